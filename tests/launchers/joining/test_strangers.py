"""Who has no token: whatever it sends or does not send costs its connection, and the next machine joins as ever."""

from __future__ import annotations

import os
import random
import socket
import struct
import time

import msgspec
import pytest

from squall.launchers.joining import listener
from squall.launchers.joining.call import Call
from squall.launchers.joining.hello import HELLO_BYTES
from squall.launchers.joining.joining import join
from squall.transports.certificates import call_reception
from squall.transports.opening import OPEN_WITHIN_S
from tests import deep
from tests.launchers.joining.head import SOON_S, Head


def joins(head: Head) -> None:
    joined = len(head.joined)
    with head.attended():
        join(Call(head.address, head.token, wait_s=SOON_S), print).pipe.close()
    assert len(head.joined) == joined + 1


def closed(connection: socket.socket) -> bool:
    """Whether the other end has closed it; what it has said before is of no interest."""
    connection.settimeout(SOON_S)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_who_sends_nothing_is_sent_away_after_a_while_and_takes_no_memory_until_then(head: Head) -> None:
    with socket.create_connection(head.address) as silent, socket.create_connection(head.address) as half:
        half.sendall(b"\x16\x03\x01\x02\x00")  # a record of TLS begins
        head.until(lambda: head.listener.wake_at is not None and len(head.listener._strangers) == 2)
        began = head.listener.wake_at
        assert began is not None
        assert not head.listener.turn(began - 1.0)
        assert len(head.listener._strangers) == 2
        joins(head)
        head.listener.turn(time.monotonic() + OPEN_WITHIN_S)
        assert closed(silent)
        assert closed(half)
    assert head.listener.wake_at is None


def test_so_many_strangers_wait_at_a_time_and_the_first_of_them_makes_room(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "STRANGERS_AT_MOST", 3)
    strangers = [socket.create_connection(head.address) for _ in range(5)]
    last = strangers[-1].getsockname()
    head.until(lambda: last in [s._opening.connection.getpeername() for s in head.listener._strangers.values()])
    assert len(head.listener._strangers) == 3
    assert closed(strangers[0])
    assert closed(strangers[1])
    joins(head)
    for stranger in strangers:
        stranger.close()


def test_a_wrong_secret_waits_for_its_answer_and_is_not_listened_to_meanwhile(head: Head) -> None:
    with head.attended():
        stranger = call_reception(socket.create_connection(head.address), head.token.fingerprint)
    stranger.sendall(framed(b"x" * 43) + framed(head.token.secret.encode()))
    head.until(lambda: any(s.wrong for s in head.listener._strangers.values()))
    until = head.listener.wake_at
    assert until is not None
    assert until <= time.monotonic() + listener.WRONG_AFTER_S
    head.turn()
    assert len(head.listener._strangers) == 1
    assert not head.listener.turn(until)
    assert b"the token is wrong" in stranger.recv(1 << 16)
    assert closed(stranger)
    assert not head.joined
    stranger.close()


def framed(message: bytes) -> bytes:
    return struct.pack("!I", len(message)) + message


def without_tls(chance: random.Random) -> bytes:
    kind = chance.randrange(4)
    if kind == 0:
        return chance.randbytes(chance.randrange(1, 2000))
    if kind == 1:
        return b"GET / HTTP/1.1\r\n\r\n"
    length = chance.randrange(1 << 16)
    return b"\x16\x03\x01" + struct.pack("!H", length) + b"\x01" + chance.randbytes(chance.randrange(100 + length))


def within_tls(chance: random.Random, secret: bytes) -> bytes:
    kind = chance.randrange(6)
    if kind == 0:
        return chance.randbytes(chance.randrange(1, 2000))
    if kind == 1:
        return struct.pack("!I", chance.randrange(len(secret) + 1, 1 << 32))
    if kind == 2:
        return framed(secret)[: chance.randrange(1, len(secret) + 4)]
    if kind == 3:  # from here on it has the secret
        return framed(secret) + struct.pack("!I", chance.randrange(HELLO_BYTES + 1, 1 << 32))
    if kind == 4:
        return framed(secret) + framed(
            chance.choice([b"", b"[" * HELLO_BYTES, b'{"cores":"many"}', b'{"cores":0}', b'{"a":' + b"[" * 9000])
        )
    return framed(secret) + framed(msgspec.json.encode({"machine": "x" * 1000}))[:-1]


def test_nonsense_of_strangers_costs_their_connections_and_no_more(head: Head) -> None:
    """10,000 in `make deep`: half of them without TLS."""
    chance = random.Random(16)
    joins(head)
    files = len(os.listdir("/proc/self/fd"))
    with head.attended():
        for i in deep.sweep(range(10_000), 500):
            raw = socket.create_connection(head.address, SOON_S)
            try:
                if i % 2:
                    raw.sendall(without_tls(chance))
                    raw.shutdown(socket.SHUT_WR)
                else:
                    raw = call_reception(raw, head.token.fingerprint)
                    raw.sendall(within_tls(chance, head.token.secret.encode()))
            except OSError:
                pass  # it was sent away before it had said all
            finally:
                raw.close()
    head.until(lambda: not head.listener._strangers)
    assert len(os.listdir("/proc/self/fd")) == files
    assert len(head.joined) == 1
    joins(head)
