"""How far it is from one machine to another, and how wide the way: over connections as a run has them.

The machine that is called stands there as a shard, and the one that calls as a replica that pushes to it.
"""

from __future__ import annotations

import math
import select
import socket
import statistics
import time
from itertools import count
from typing import NamedTuple

from squall.protocol.effects import Payload
from squall.protocol.events import Event, FrameArrived, PeerReached
from squall.protocol.frames import Frame, Message
from squall.protocol.messages import Exchange
from squall.protocol.nodes import Node
from squall.transports.certificates import Identity, machine_name
from squall.transports.stream import Views
from squall.transports.streams import Address, Streams

REACHED_WITHIN_S = 5.0
ANSWER_WITHIN_S = 30.0  # of as many bytes as may have been foreseen to take a second
ROUND_TRIPS, WARM_UP = 20, 5
PART_BYTES, MOST_PARTS = 1 << 16, 1 << 12  # of a message: 256 MiB at most
TICK_S = 1e-6  # the least that a core works
GROWS = 16  # at most, from one message to the next


class Unreached(Exception):
    """Nobody answers there, or not as the machine that was called."""


class Way(NamedTuple):
    """From one machine to another."""

    round_trip_s: float
    bytes_s: float  # of numbers
    carry: float  # bytes of them that were sent in a second of a core


class Ends:
    """One machine's ends of all its links. Without threads: who listens asks `attend` when it is readable."""

    def __init__(self, machine: int, identity: Identity, listener: socket.socket, plaintext: bool) -> None:
        self._machine = machine
        self._identity = identity
        self._plaintext = plaintext
        self._count = count(1)
        self._called = self._streams(Node("shard", machine), {}, listener)

    def fileno(self) -> int:
        return self._called.fileno()

    @property
    def wake_at(self) -> float:
        return self._called.wake_at

    def attend(self) -> None:
        """Answer whoever calls."""
        self._called.turn(time.monotonic())
        while (event := self._called.take()) is not None:
            if isinstance(event, FrameArrived):
                self._called.send(event.sender, Frame(0, event.frame.number))
                self._called.turn(time.monotonic())

    def call(self, machine: int, address: Address, seconds: float) -> Way:
        """Measure the way to another machine for about so long. Raises `Unreached`."""
        shard = Node("shard", machine)
        streams = self._streams(Node("replica", self._machine), {shard: address}, None)
        try:
            if not _came(streams, PeerReached, REACHED_WITHIN_S):
                raise Unreached(_why(address))
            times = [self._push(streams, shard, 0) for _ in range(WARM_UP + ROUND_TRIPS)]
            round_trip_s = statistics.median(times[WARM_UP:])
            parts, core_s = 1, time.process_time()
            while (took_s := self._push(streams, shard, parts)) < seconds and parts < MOST_PARTS:
                parts = min(MOST_PARTS, int(parts * min(GROWS, 1.5 * seconds / took_s)) + 1)
                core_s = time.process_time()
            size, core_s = parts * PART_BYTES, time.process_time() - core_s
            return Way(round_trip_s, size / max(took_s - round_trip_s, took_s / 2), size / max(core_s, TICK_S))
        finally:
            streams.close()

    def close(self) -> None:
        self._called.close()

    def _push(self, streams: Streams, shard: Node, parts: int) -> float:
        """Seconds of a message of so many parts, and one without any back."""
        number = next(self._count)
        push = Payload("gradient", Node("replica", self._machine), 0, parts, shard.index) if parts else None
        began = time.monotonic()
        streams.send(shard, Frame(number, number - 1, Exchange(number, gradient=0)), push)
        if not _came(streams, FrameArrived, ANSWER_WITHIN_S):
            raise Unreached(f"it does not answer within {ANSWER_WITHIN_S:g} s to {parts * PART_BYTES:,} bytes")
        return time.monotonic() - began

    def _streams(self, own: Node, addresses: dict[Node, Address], listener: socket.socket | None) -> Streams:
        contexts = self._identity.issue(str(own)).contexts()
        return Streams(contexts, _Part(), addresses, listener, self._plaintext)


class _Part:
    """Of both: a replica pushes, and a shard says that it has come. The numbers are read by nobody."""

    every_s = math.inf

    def __init__(self) -> None:
        self._numbers = memoryview(bytearray(PART_BYTES))

    def places(self, payload: Payload, peer: Node) -> Views:
        """As many parts as the payload's clock says, all at the same place."""
        if not 0 < payload.clock <= MOST_PARTS:
            raise ValueError(f"{payload.clock} parts")
        return (self._numbers,) * payload.clock

    def check(self, sender: Node, message: Message | None, payload: Payload | None) -> None:
        if not isinstance(message, Exchange | None):
            raise ValueError(f"nobody says {type(message).__name__} here")

    def admit(self, node: Node, machine: int) -> None:
        """Nobody moves."""

    def vouches(self, authority: str, node: Node) -> bool:
        return authority == machine_name(node.index)

    def reports(self, node: Node) -> bool:
        return False


def _came(streams: Streams, kind: type[Event], within_s: float) -> bool:
    """Wait until an event of this kind has come."""
    watched = select.poll()
    watched.register(streams, select.POLLIN)
    until = time.monotonic() + within_s
    while True:
        streams.turn(time.monotonic())
        if (event := streams.take()) is not None:
            if isinstance(event, kind):
                return True
            continue
        now = time.monotonic()
        if now >= until:
            return False
        watched.poll(max(0.0, min(streams.wake_at, until) - now) * 1000)


def _why(address: Address) -> str:
    """Why nobody was reached there."""
    try:
        socket.create_connection(address, REACHED_WITHIN_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return "what answers there is not that machine of the run"
