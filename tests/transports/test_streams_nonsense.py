"""Whatever a stranger or a member of the run sends over a stream costs its connection, and never the receiver."""

from __future__ import annotations

import gc
import os
import random
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from zlib import crc32

import msgspec
import pytest

from squall.protocol.effects import Payload
from squall.protocol.events import PeerRefused
from squall.protocol.frames import MAX_FRAME_BYTES, Frame
from squall.protocol.messages import Exchange
from squall.transports.certificates import Identity
from squall.transports.opening import REST_S, Opening
from squall.transports.stream import MAX_HEAD_BYTES, Broken, Head, prefix
from squall.transports.streams import OPENING_AT_MOST
from tests import deep
from tests.transports.test_streams import GRADIENT, REPLICA, SHARD, SIZE, End, readable, turns

FRAME = Frame(1, 0, Exchange(1, gradient=0))


@pytest.fixture
def machine() -> Identity:
    return Identity.new_root("a run").issue("machine-0", authority=True)


@pytest.fixture
def shard(machine: Identity) -> Iterator[End]:
    end = End(machine.issue(str(SHARD)))
    yield end
    end.streams.close()


def framed(head: bytes) -> bytes:
    return prefix(len(head), crc32(head)) + head


def nonsense(chance: random.Random) -> bytes:
    """Nothing of it is a message that a process sends, or it breaks off."""
    whole = framed(msgspec.msgpack.encode(Head(SIZE, FRAME, GRADIENT)))
    nested = chance.choice([b"\x91", b"\x93\x00", b"\x81\xa1a"]) * 20_000
    elsewhere = Payload("nowhere", REPLICA, 0, 1, 0)
    kinds = (
        lambda: prefix(chance.choice([0, MAX_HEAD_BYTES + 1, (1 << 32) - 1]), 0),
        lambda: framed(chance.randbytes(chance.randrange(1, 300))),
        lambda: framed(chance.choice([nested, b"\x93\x00\x92\x01\x00" + nested])),
        lambda: framed(msgspec.msgpack.encode([10, FRAME, None])),  # numbers that belong to nothing
        lambda: framed(msgspec.msgpack.encode([chance.choice([0, SIZE - 1, SIZE + 1, 1 << 62]), FRAME, GRADIENT])),
        lambda: framed(msgspec.msgpack.encode(Head(SIZE, FRAME, elsewhere))),
        lambda: framed(msgspec.msgpack.encode([0, [-1, 0, None], None])),
        lambda: framed(msgspec.msgpack.encode([0, [1, 0, ["no message", 3]], None])),
        lambda: whole[: chance.randrange(1, len(whole))],
        lambda: whole + chance.randbytes(chance.randrange(1000)),  # its numbers break off
        lambda: prefix(MAX_FRAME_BYTES, 0) + b"\x93",
        lambda: bytes(byte ^ (chance.random() < 0.05) << chance.randrange(8) for byte in whole),
    )
    return chance.choice(kinds)()


def connected(shard: End, client: object) -> Opening:
    """A call to the shard that is encrypted, at whose end anything can be sent."""
    opening = Opening.dial(shard.address, client, time.monotonic())  # type: ignore[arg-type]
    shard.events.clear()
    turns(shard, until=lambda: _gone_on(opening) and bool(shard.events))
    return opening


def _gone_on(opening: Opening) -> bool:
    try:
        return opening.go()
    except Broken:
        raise AssertionError("the shard has refused it") from None


def test_nonsense_of_a_member_costs_its_connection_and_no_more(machine: Identity, shard: End) -> None:
    """10,000 in `make deep`: a stream breaks with the first, so that each has one of its own."""
    chance = random.Random(16)
    client, _ = machine.issue(str(REPLICA)).contexts()
    gc.collect()  # what earlier tests have left
    files = len(os.listdir("/proc/self/fd"))
    for _ in deep.sweep(range(10_000), 300):
        opening = connected(shard, client)
        shard.events.clear()
        connection = opening.connection
        connection.setblocking(True)
        connection.sendall(nonsense(chance))
        connection.shutdown(socket.SHUT_WR)
        turns(shard, until=lambda: REPLICA not in shard.streams._streams)
        assert FRAME not in shard.frames
        opening.close()
    assert len(os.listdir("/proc/self/fd")) == files
    replica = End(machine.issue(str(REPLICA)), {SHARD: shard.address})
    shard.events.clear()
    turns(replica, shard, until=lambda: bool(replica.events))
    replica.send(SHARD, Frame(1, 0, Exchange(1)))
    turns(replica, shard, until=lambda: Frame(1, 0, Exchange(1)) in shard.frames)
    replica.streams.close()


@pytest.mark.parametrize("bit", [0, 7])
def test_what_is_changed_on_its_way_costs_its_connection_and_nobody(machine: Identity, bit: int) -> None:
    """In plain text: whatever byte of a head it is, the peer has not said that, and says it again."""
    shard = End(machine.issue(str(SHARD)), plaintext=True)
    replica = End(machine.issue(str(REPLICA)), {SHARD: shard.address}, plaintext=True)
    whole = framed(msgspec.msgpack.encode(Head(SIZE, FRAME, GRADIENT)))
    for place in range(0, len(whole), 3):
        shard.events.clear()
        replica.events.clear()
        replica.streams._redial.clear()  # of the pauses that grow
        turns(replica, shard, until=lambda: bool(replica.events and shard.events))
        changed = bytearray(whole)
        changed[place] ^= 1 << bit
        replica.streams._streams[SHARD].connection.send(changed)
        turns(shard, until=lambda: REPLICA not in shard.streams._streams)
        assert not [event for event in shard.events if isinstance(event, PeerRefused)]
        assert not shard.frames
        turns(replica, until=lambda: SHARD not in replica.streams._streams)
    replica.memory[:] = b"1" * SIZE
    turns(replica, shard, until=lambda: SHARD in replica.streams._streams and replica.streams._streams[SHARD].ready)
    replica.send(SHARD, FRAME, GRADIENT)
    turns(replica, shard, until=lambda: FRAME in shard.frames)
    assert shard.memory == replica.memory
    for end in (replica, shard):
        end.streams.close()


def test_strangers_who_say_nothing_keep_nobody_out_for_long(machine: Identity, shard: End) -> None:
    strangers = [socket.create_connection(shard.address) for _ in range(OPENING_AT_MOST)]
    turns(shard, until=lambda: len(shard.streams._opening) == OPENING_AT_MOST)
    replica = End(machine.issue(str(REPLICA)), {SHARD: shard.address})
    turns(replica, shard, until=lambda: bool(replica.events))
    assert len(shard.streams._opening) == OPENING_AT_MOST - 1
    for stranger in strangers:
        stranger.close()
    replica.streams.close()


@contextmanager
def no_more_files() -> Iterator[None]:
    """In here this process may open none."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1 + max(map(int, os.listdir("/proc/self/fd"))), before[1]))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for file in taken:
            os.close(file)


def test_without_room_for_a_connection_it_rests_and_says_so_once(
    shard: End, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    for _ in range(2):
        caller = socket.create_connection(shard.address)
        with no_more_files():
            now = time.monotonic()
            shard.streams.turn(now)
            assert shard.streams.wake_at <= now + REST_S
            assert not readable(shard), "it would spin"
        shard.streams.turn(now + REST_S)
        assert shard.streams._opening
        caller.close()
        turns(shard, until=lambda: not shard.streams._opening)
    assert capfd.readouterr().err.count("who calls has to wait (Too many open files)") == 1


def test_nonsense_of_strangers_costs_their_connections_and_no_more(shard: End) -> None:
    """They have no certificate, and come no further than TLS."""
    chance = random.Random(16)
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(10_000):
        with socket.create_connection(shard.address) as stranger:
            record = b"\x16\x03\x01" + struct.pack("!H", chance.randrange(1 << 16)) + b"\x01"
            stranger.sendall(chance.choice([b"", record]) + chance.randbytes(chance.randrange(1, 2000)))
        shard.streams.turn(time.monotonic())
    turns(shard, until=lambda: not shard.streams._opening)
    assert not shard.events
    assert len(os.listdir("/proc/self/fd")) == files
