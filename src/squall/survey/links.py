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
from typing import NamedTuple, TypeVar

from squall.errors import SquallError
from squall.launchers.control_pipe import ControlPipe
from squall.protocol.effects import Payload
from squall.protocol.events import Event, FrameArrived, PeerReached
from squall.protocol.frames import Frame, Message
from squall.protocol.messages import Exchange
from squall.protocol.nodes import Node
from squall.survey.messages import Called
from squall.transports.certificates import Identity, machine_name
from squall.transports.stream import Views
from squall.transports.streams import Address, Streams

REACHED_WITHIN_S = 5.0
ANSWER_WITHIN_S = 30.0  # of as many bytes as may have been foreseen to take a second
ROUND_TRIPS, WARM_UP = 20, 5
PART_BYTES, MOST_PARTS = 1 << 16, 1 << 12  # of a message: 256 MiB at most
TICK_S = 1e-6  # the least that a core works
GROWS = 16  # at most, from one message to the next

E = TypeVar("E", bound=Event)


class Ends(NamedTuple):
    """One machine's ends of all its links."""

    machine: int
    identity: Identity  # its authority
    plaintext: bool

    def attend(self, listener: socket.socket, line: ControlPipe) -> None:
        """Answer whoever calls, in a process of its own that is ended when nobody calls any more."""
        streams = self._streams(Node("shard", self.machine), {}, listener)
        while (pushed := _next(streams, FrameArrived, math.inf)) is not None:
            streams.send(pushed.sender, Frame(0, pushed.frame.number))

    def call(self, machine: int, address: Address, seconds: float) -> Called:
        """Measure the way to another machine for about so long. Raises `SquallError`: it does not answer, or not so."""
        own, shard, numbers = Node("replica", self.machine), Node("shard", machine), count(1)
        streams = self._streams(own, {shard: address}, None)

        def push(parts: int) -> float:
            """Seconds of a message of so many parts, and one without any back."""
            number, began = next(numbers), time.monotonic()
            payload = Payload("gradient", own, 0, parts, machine) if parts else None
            streams.send(shard, Frame(number, number - 1, Exchange(number, gradient=0)), payload)
            if _next(streams, FrameArrived, ANSWER_WITHIN_S) is None:
                what = f"{parts * PART_BYTES:,} bytes"
                raise SquallError(f"it does not answer within {ANSWER_WITHIN_S:g} s to {what}")
            return time.monotonic() - began

        try:
            if _next(streams, PeerReached, REACHED_WITHIN_S) is None:
                raise SquallError(_why(address))
            round_trip_s = statistics.median([push(0) for _ in range(WARM_UP + ROUND_TRIPS)][WARM_UP:])
            parts, core_s = 1, time.process_time()
            while (took_s := push(parts)) < seconds and parts < MOST_PARTS:
                parts = min(MOST_PARTS, int(parts * min(GROWS, 1.5 * seconds / took_s)) + 1)
                core_s = time.process_time()
            size, core_s = parts * PART_BYTES, time.process_time() - core_s
            return Called("", round_trip_s, size / max(took_s - round_trip_s, took_s / 2), size / max(core_s, TICK_S))
        finally:
            streams.close()

    def _streams(self, own: Node, addresses: dict[Node, Address], listener: socket.socket | None) -> Streams:
        contexts = self.identity.issue(str(own)).contexts()
        return Streams(contexts, _Part(), addresses, listener, self.plaintext)


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

    def admit(self, node: Node, machine: int, address: str = "") -> None:
        """Nobody moves."""

    def has(self, node: Node) -> bool:
        return False

    def vouches(self, authority: str, node: Node) -> bool:
        return authority == machine_name(node.index)

    def reports(self, node: Node) -> bool:
        return False


def _next(streams: Streams, kind: type[E], within_s: float) -> E | None:
    """The next event of this kind, if it comes in time; others are passed over."""
    watched = select.poll()
    watched.register(streams, select.POLLIN)
    until = time.monotonic() + within_s
    while (now := time.monotonic()) < until:
        streams.turn(now)
        if isinstance(event := streams.take(), kind):
            return event
        if event is None and (wake_at := min(streams.wake_at, until)) > now:
            watched.poll(None if wake_at == math.inf else 1000 * (wake_at - now))
    return None


def _why(address: Address) -> str:
    """Why nobody was reached there."""
    try:
        socket.create_connection(address, REACHED_WITHIN_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return "what answers there is not that machine of the run"
