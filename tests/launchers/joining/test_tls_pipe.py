"""A pipe over TLS: messages whole and in order, nobody is kept waiting, and nonsense ends it and nothing else."""

from __future__ import annotations

import os
import random
import resource
import socket
import struct
import threading
import time
from multiprocessing.connection import wait

import pytest

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.joining.tls_pipe import TlsPipe
from tests import deep
from tests.launchers.joining.head import SOON_S, tls_pair

LIMIT = 1 << 16
LARGE = 30_000_000  # bytes: more than all buffers between two ends hold


def framed(message: bytes) -> bytes:
    return struct.pack("!I", len(message)) + message


def ready(pipe: TlsPipe, timeout_s: float = 0.0) -> bool:
    return bool(wait([pipe], timeout_s))  # type: ignore[list-item]  # typeshed: it takes what has a fileno


def test_messages_that_came_together_are_told_one_after_the_other() -> None:
    pipe, peer = tls_pair(LIMIT)
    pipe.poll()
    assert not ready(pipe)
    peer.sendall(framed(b"first") + framed(b"") + framed(b"x" * LIMIT) + framed(b"last")[:6])
    for message in (b"first", b"", b"x" * LIMIT):
        assert ready(pipe, SOON_S), "also what OpenSSL has read already"
        assert pipe.poll(SOON_S)
        assert pipe.recv_bytes() == message
    assert not pipe.poll(0.0), "a part of one"
    assert not ready(pipe)
    peer.sendall(framed(b"last")[6:])
    assert pipe.poll(SOON_S)
    assert pipe.recv_bytes() == b"last"
    peer.close()
    assert pipe.poll(SOON_S)
    with pytest.raises(EOFError):
        pipe.recv_bytes()
    pipe.close()


def test_what_a_peer_does_not_read_keeps_nobody_waiting_and_goes_on_when_it_does() -> None:
    pipe, peer = tls_pair(LIMIT)
    message = random.Random(1).randbytes(LARGE)
    began = time.monotonic()
    pipe.send_bytes(message)
    pipe.poll()
    assert time.monotonic() - began < SOON_S
    other = TlsPipe(peer, LARGE)
    while not other.poll():
        pipe.poll()
    assert other.recv_bytes() == message
    pipe.close()
    other.close()


def test_who_flushes_goes_on_as_the_peer_reads() -> None:
    pipe, peer = tls_pair(LIMIT)
    other = TlsPipe(peer, LARGE)
    got: list[bytes] = []
    reading = threading.Thread(target=lambda: got.extend(other.recv_bytes() for _ in range(30)))
    reading.start()
    for i in range(30):
        pipe.send_bytes(bytes([i]) * (LARGE // 30))
        pipe.flush(1 << 20)
        assert pipe._unsent <= 1 << 20
    while reading.is_alive():
        pipe.poll()
    assert [message[0] for message in got] == list(range(30))
    pipe.close()
    other.close()


def test_who_leaves_has_sent_all_before() -> None:
    pipe, peer = tls_pair(LIMIT)
    other = TlsPipe(peer, LARGE)
    got: list[bytes] = []
    reading = threading.Thread(target=lambda: got.extend(other.recv_bytes() for _ in range(2)))
    pipe.send_bytes(b"x" * LARGE)
    pipe.send_bytes(b"the last")
    reading.start()
    pipe.flush()
    pipe.close()
    reading.join(SOON_S)
    assert got == [b"x" * LARGE, b"the last"]
    other.close()


def test_a_fork_that_closes_its_end_leaves_that_of_its_parent() -> None:
    pipe, peer = tls_pair(LIMIT)
    pid = os.fork()
    if not pid:
        pipe.close()
        os._exit(0)
    os.waitpid(pid, 0)
    peer.sendall(framed(b"after it"))
    assert ready(pipe, SOON_S)
    assert pipe.recv_bytes() == b"after it"
    pipe.send_bytes(b"and back")
    assert peer.recv(100) == framed(b"and back")
    pipe.close()
    assert pipe.closed
    pipe.close()


def test_a_control_pipe_speaks_over_it_and_ends_with_what_is_no_message() -> None:
    pipe, peer = tls_pair(LIMIT)
    here, there = ControlPipe(pipe), ControlPipe(TlsPipe(peer, LIMIT))
    here.say(kind="launch", snapshot=3)
    assert there.hear() == {"kind": "launch", "snapshot": 3}
    there.connection.send_bytes(b'{"kind":' + b"[" * (LIMIT - 100))
    assert here.hear() is None
    assert not here.open
    here.connection.close()
    there.connection.close()


def nonsense(chance: random.Random) -> bytes:
    """What a member may send that is no message of Squall, or not whole."""
    kind = chance.randrange(5)
    if kind == 0:
        return struct.pack("!I", chance.randrange(LIMIT + 1, 1 << 32))
    if kind == 1:
        return struct.pack("!I", chance.randrange(1, LIMIT)) + b"{"
    if kind == 2:
        return framed(chance.randbytes(chance.randrange(200)))
    if kind == 3:
        return framed(chance.choice([b"", b"[]", b"null", b'{"kind":', b'{"a":' + b"[" * 9000, b'"\xff"', b"{}{}"]))
    return chance.randbytes(chance.randrange(1, 4))


@pytest.mark.timeout(600)
def test_nonsense_of_a_member_costs_its_connection_and_no_more() -> None:
    """10,000 in `make deep`. What is read and understood as no message closes; what is not whole waits for its end."""
    chance = random.Random(16)
    before = len(os.listdir("/proc/self/fd")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in deep.sweep(range(10_000), 300):
        pipe, peer = tls_pair(LIMIT)
        control = ControlPipe(pipe)
        peer.sendall(nonsense(chance))
        peer.shutdown(socket.SHUT_WR)
        assert pipe.poll(SOON_S)
        assert control.hear() is None
        pipe.close()
        peer.close()
    assert len(os.listdir("/proc/self/fd")) == before[0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[1] < 64 << 10, "kilobytes: nothing was allocated"
