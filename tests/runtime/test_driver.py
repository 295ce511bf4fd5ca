"""The real shell and its transport: what goes wrong between processes has a name, and nothing hangs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from squall.errors import PeerFault
from squall.protocol.core import COORDINATOR, Effect, End, Event, MessageArrived, Node, Send, Started, TimePassed
from squall.protocol.link import Linked
from squall.protocol.messages import MAX_FRAME_BYTES, Frame, Join, Stop, encode
from squall.runtime.driver import LINGER_S, Driver
from squall.transports.host import HostTransport

REPLICA = Node("replica", 1)
SOON_S = 5.0


class Wire:
    """A transport that is a list, under a clock that the waits move."""

    def __init__(self, *arriving: bytes) -> None:
        self.arriving = deque(arriving)
        self.sent: list[tuple[Node, bytes]] = []
        self.now = 0.0

    def send(self, to: Node, data: bytes) -> None:
        self.sent.append((to, data))

    def receive(self, timeout_s: float | None) -> tuple[Node, bytes] | None:
        if self.arriving:
            return COORDINATOR, self.arriving.popleft()
        assert timeout_s is not None, "it would wait for ever"
        self.now += timeout_s
        return None


class Machine:
    """Joins, and ends when it is told to stop or when its time has come."""

    def __init__(self, wake_at: float | None = None) -> None:
        self.wake_at = wake_at
        self.seen: list[Event] = []

    def on(self, event: Event, now: float) -> list[Effect]:
        self.seen.append(event)
        match event:
            case Started():
                return [Send(COORDINATOR, Join(1))]
            case MessageArrived(_, Stop()) | TimePassed():
                self.wake_at = None
                return [End("told to")]
        return []


class Nothing:
    def attach(self, payload: Any) -> None: ...

    def perform(self, effect: Effect, now: float) -> Event | None:
        return None

    def poll(self) -> Event | None:
        return None


def drive(machine: Machine, wire: Wire) -> End:
    return Driver(Linked(machine), wire, Nothing(), lambda: wire.now).run()


def test_a_node_runs_from_its_start_to_its_end() -> None:
    machine, wire = Machine(), Wire(encode(Frame(1, 1, Stop())))
    assert drive(machine, wire) == End("told to")
    assert [type(event) for event in machine.seen] == [Started, MessageArrived]
    assert wire.sent[0] == (COORDINATOR, encode(Frame(1, 0, Join(1))))
    assert wire.now == 0, "its join was acknowledged: there is nothing to linger for"


def test_time_that_a_machine_waits_for_comes() -> None:
    machine, wire = Machine(wake_at=0.25), Wire()
    drive(machine, wire)
    assert type(machine.seen[-1]) is TimePassed
    assert wire.now == pytest.approx(0.25 + LINGER_S, abs=0.06), "then it lingers, because its join is unanswered"


GARBAGE = [b"", b"\xff\xfe garbage", b"\x93\x01\x00\x91\xa4boom", encode(Frame(1, 0, Stop()))[:-1], b"\x80\x04K\x01."]


@pytest.mark.parametrize("data", GARBAGE)
def test_what_is_no_frame_is_a_peers_fault(data: bytes) -> None:
    with pytest.raises(PeerFault, match=r"coordinator-0\.0 sent something that is not a frame"):
        drive(Machine(), Wire(data))


# ---------------------------------------------------------------- ZeroMQ


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[HostTransport, HostTransport]]:
    server = HostTransport(COORDINATOR, tmp_path, serve=True)
    client = HostTransport(REPLICA, tmp_path, peers=[COORDINATOR])
    until_connected(client, server)
    yield server, client
    client.close()
    server.close()


def until_connected(client: HostTransport, server: HostTransport) -> None:
    """A frame to a peer that is not there yet is lost: the link above resends, here the first one is repeated."""
    for _ in range(500):
        client.send(COORDINATOR, b"hello")
        if server.receive(0.01) is not None:
            break
    else:
        raise AssertionError("not connected")
    client.send(COORDINATOR, b"last hello")
    while (received := server.receive(SOON_S)) is not None and received[1] != b"last hello":
        pass


def test_frames_arrive_in_order_in_both_directions(ends: tuple[HostTransport, HostTransport]) -> None:
    server, client = ends
    for number in range(300):
        client.send(COORDINATOR, b"%d" % number)
    assert [server.receive(SOON_S) for _ in range(300)] == [(REPLICA, b"%d" % number) for number in range(300)]
    for number in range(300):
        server.send(REPLICA, b"%d" % number)
    assert [client.receive(SOON_S) for _ in range(300)] == [(COORDINATOR, b"%d" % number) for number in range(300)]
    assert client.receive(0) is None


def test_a_peer_that_is_not_there_is_no_error(ends: tuple[HostTransport, HostTransport]) -> None:
    server, _ = ends
    server.send(Node("replica", 9), b"anyone?")
    server.send(Node("replica", 1, 1), b"its replacement?")


def test_a_peer_that_has_gone_is_no_error(tmp_path: Path) -> None:
    server = HostTransport(COORDINATOR, tmp_path, serve=True)
    client = HostTransport(REPLICA, tmp_path, peers=[COORDINATOR])
    until_connected(client, server)
    client.close()
    for _ in range(100):
        server.send(REPLICA, b"still there?")
    assert server.receive(0.01) is None
    server.close()


def test_a_frame_that_is_too_large_is_dropped(ends: tuple[HostTransport, HostTransport]) -> None:
    server, client = ends
    client.send(COORDINATOR, bytes(MAX_FRAME_BYTES + 1))
    until_connected(client, server)  # ZeroMQ closes the connection of the sender, which opens another
    client.send(COORDINATOR, bytes(MAX_FRAME_BYTES))
    received = server.receive(SOON_S)
    assert received is not None
    assert len(received[1]) == MAX_FRAME_BYTES


@pytest.mark.parametrize("name", [None, b"nobody", b"\xff\xff", b"replica-x.y"])
@pytest.mark.parametrize("parts", [[b"data"], [b"two", b"parts"]])
def test_strangers_are_not_listened_to(tmp_path: Path, name: bytes | None, parts: list[bytes]) -> None:
    server = HostTransport(COORDINATOR, tmp_path, serve=True)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    if name is not None:
        stranger.setsockopt(zmq.ROUTING_ID, name)
    stranger.connect(f"ipc://{tmp_path}/{COORDINATOR}")
    stranger.send_multipart(parts)
    try:
        assert server.receive(0.1) is None
    except PeerFault:
        pass  # blames the peer, which is as good
    finally:
        stranger.close()
        context.term()
        server.close()


def test_something_else_can_wake_a_waiting_process(tmp_path: Path) -> None:
    import os

    reading, writing = os.pipe()
    server = HostTransport(COORDINATOR, tmp_path, serve=True, wake_on=reading)
    os.write(writing, b"!")
    assert server.receive(None) is None
    server.close()
    os.close(reading)
    os.close(writing)
