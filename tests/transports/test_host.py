"""What carries frames between the processes of one host: nothing is lost, nothing starves, nothing hangs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from squall.errors import PeerFault
from squall.protocol.frames import MAX_FRAME_BYTES
from squall.protocol.nodes import COORDINATOR, Node
from squall.transports.host import HostTransport
from tests.launchers.processes import wait_for

REPLICA, SHARD = Node("replica", 1), Node("shard")
SOON_S = 5.0
Ends = tuple[HostTransport, HostTransport]


@pytest.fixture(params=[COORDINATOR, SHARD], ids=str)
def server_node(request: pytest.FixtureRequest) -> Node:
    """Over ZeroMQ, and by doorbells."""
    node: Node = request.param
    return node


@pytest.fixture
def ends(tmp_path: Path, server_node: Node) -> Iterator[Ends]:
    server = HostTransport(server_node, tmp_path, serve=True)
    client = HostTransport(REPLICA, tmp_path, peers=[server_node])
    until_connected(client, server, server_node)
    yield server, client
    client.close()
    server.close()


def heard(transport: HostTransport) -> tuple[Node, bytes] | None:
    """The next frame. `receive` may return early without one."""
    ends = time.monotonic() + SOON_S
    while (received := transport.receive(SOON_S)) is None and time.monotonic() < ends:
        pass
    return received


def until_connected(client: HostTransport, server: HostTransport, node: Node) -> None:
    """A frame to a peer that is not there yet is lost: the link above resends, here the first one is repeated."""
    for _ in range(500):
        client.send(node, b"hello")
        if server.receive(0.01) is not None:
            break
    else:
        raise AssertionError("not connected")
    client.send(node, b"last hello")
    while (received := heard(server)) is not None and received[1] != b"last hello":
        pass


def test_frames_arrive_in_both_directions(ends: Ends, server_node: Node) -> None:
    server, client = ends
    for number in range(300):
        client.send(server_node, b"%d" % number)
        assert heard(server) == (REPLICA, b"%d" % number)
        server.send(REPLICA, b"%d" % number)
        assert heard(client) == (server_node, b"%d" % number)
    assert client.receive(0) is None


def test_a_burst_longer_than_the_queue_arrives_whole(ends: Ends, server_node: Node) -> None:
    """Doorbells that find the queue full go over ZeroMQ, and may overtake; the link puts them in order."""
    server, client = ends
    frames = [b"%d" % number for number in range(300)]
    for frame in frames:
        client.send(server_node, frame)
    received = [heard(server) for _ in frames]
    assert sorted(frame for _, frame in filter(None, received)) == sorted(frames)


def test_control_does_not_starve_behind_exchanges(tmp_path: Path) -> None:
    coordinator = HostTransport(COORDINATOR, tmp_path, serve=True)
    shard = HostTransport(SHARD, tmp_path, serve=True, peers=[COORDINATOR])
    replica = HostTransport(REPLICA, tmp_path, peers=[SHARD])
    until_connected(shard, coordinator, COORDINATOR)
    coordinator.send(SHARD, b"view")

    def taken() -> bool:
        replica.send(SHARD, b"push")  # there is always another one
        return shard.receive(SOON_S) == (COORDINATOR, b"view")

    wait_for(lambda: any(taken() for _ in range(1000)), SOON_S, "the view, which a thread has yet to bring")
    for transport in (replica, shard, coordinator):
        transport.close()


def test_a_peer_that_is_not_there_is_no_error(ends: Ends) -> None:
    server, _ = ends
    server.send(Node("replica", 9), b"anyone?")
    server.send(Node("replica", 1, 1), b"its replacement?")


def test_a_peer_that_has_gone_is_no_error(tmp_path: Path, server_node: Node) -> None:
    server = HostTransport(server_node, tmp_path, serve=True)
    client = HostTransport(REPLICA, tmp_path, peers=[server_node])
    until_connected(client, server, server_node)
    client.close()
    for _ in range(100):
        server.send(REPLICA, b"still there?")
    assert server.receive(0.01) is None
    server.close()


def test_a_frame_that_is_too_large_is_dropped(ends: Ends, server_node: Node) -> None:
    server, client = ends
    client.send(server_node, bytes(MAX_FRAME_BYTES + 1))
    until_connected(client, server, server_node)  # ZeroMQ closes the connection of the sender, which opens another
    for _ in range(500):
        client.send(server_node, bytes(MAX_FRAME_BYTES))
        received = server.receive(0.01)
        if received is not None:
            break
    assert received is not None
    assert len(received[1]) == MAX_FRAME_BYTES


@contextlib.contextmanager
def stranger(directory: Path, name: bytes | None) -> Iterator[zmq.Socket[bytes]]:
    """A socket that speaks to the coordinator's, under a name of its own choice."""
    context = zmq.Context()
    with context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if name is not None:
            socket.setsockopt(zmq.ROUTING_ID, name)
        socket.connect(f"ipc://{directory}/{COORDINATOR}")
        yield socket


@pytest.mark.parametrize("name", [None, b"nobody", b"\xff\xff", b"replica-x.y"])
@pytest.mark.parametrize("parts", [[b"data"], [b"two", b"parts"]])
def test_strangers_are_not_listened_to(tmp_path: Path, name: bytes | None, parts: list[bytes]) -> None:
    server = HostTransport(COORDINATOR, tmp_path, serve=True)
    with stranger(tmp_path, name) as socket:
        socket.send_multipart(parts)
        try:
            assert server.receive(0.1) is None
        except PeerFault:
            pass  # blames the peer, which is as good
        finally:
            server.close()


def test_a_frame_behind_a_strangers_is_heard_at_once(tmp_path: Path) -> None:
    server = HostTransport(COORDINATOR, tmp_path, serve=True)
    with stranger(tmp_path, str(REPLICA).encode()) as socket:
        for parts in [[b"far", b"too", b"many"]] * 3 + [[b"good"]]:
            socket.send_multipart(parts)
        received = None
        while received is None:
            received = server.receive(None)  # nothing else would wake it
        assert received == (REPLICA, b"good")
    server.close()


@pytest.mark.parametrize("timeout_s", [None, 1e7], ids=["for ever", "for months"])
def test_something_else_can_wake_a_waiting_process(tmp_path: Path, timeout_s: float | None) -> None:
    reading, writing = os.pipe()
    server = HostTransport(COORDINATOR, tmp_path, serve=True, wake_on=[reading])
    os.write(writing, b"!")
    assert server.receive(timeout_s) is None
    server.close()
    os.close(reading)
    os.close(writing)
