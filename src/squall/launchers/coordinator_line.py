"""A nursery's line to the coordinator: a pipe where that is forked from it, and TLS from another machine."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from multiprocessing.connection import Pipe
from typing import Any, Protocol

import msgspec

from squall.launchers.control_pipe import ControlPipe
from squall.protocol.effects import Payload, Transmit
from squall.protocol.events import Event, FrameArrived
from squall.protocol.frames import Frame
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.nursery_messages import Placed
from squall.protocol.speaking import COMMON
from squall.runtime.part import Part
from squall.runtime.site import Site
from squall.transports.stream import Views
from squall.transports.streams import Streams


class Line(Protocol):
    @property
    def open(self) -> bool:
        """The coordinator is there, as far as is known."""

    @property
    def sources(self) -> list[Any]:
        """What becomes readable when there is something to hear."""

    @property
    def wake_at(self) -> float | None:
        """When `hear` is to be asked though nothing has become readable."""

    def send(self, effect: Transmit) -> None: ...

    def hear(self) -> Iterator[Event | dict[str, Any]]:
        """What has come without waiting: events of the link, and what the coordinator's host tells of the run."""

    def admit(self, placed: Placed) -> None:
        """The coordinator, or its deputy, is called there from now on."""

    def forget(self, deputy: Node) -> None:
        """Nobody is called any more where it was."""

    def leave(self) -> None:
        """In a process that was forked: close what belongs to the nursery."""

    def close(self) -> None:
        """The coordinator has ended."""


class PipeLine:
    """The coordinator is one of the nursery's own processes."""

    wake_at = None

    def __init__(self) -> None:
        self.renew()
        self._evaluated = 0  # number of the newest evaluation that was told
        self.placed: dict[int, int] = {}  # replica -> the machine on which the coordinator had it started last

    def renew(self) -> None:
        """For a coordinator that is to start."""
        mine, self._theirs = Pipe()
        self._pipe = ControlPipe(mine)
        self._newest = 0  # number of the newest message that went in: none of it is lost before its reader

    @property
    def open(self) -> bool:
        return self._pipe.open

    @property
    def sources(self) -> list[Any]:
        return [self._pipe.connection] if self._pipe.open else []

    def send(self, effect: Transmit) -> None:
        if effect.frame.number > self._newest or effect.frame.number <= 0:
            self._newest = max(effect.frame.number, self._newest)
            self._pipe.say(kind="frame", frame=effect.frame)

    def hear(self) -> Iterator[Event | dict[str, Any]]:
        while self._pipe.open and self._pipe.connection.poll():
            said = self._pipe.hear()
            if said is not None and said["kind"] == "frame":
                yield FrameArrived(COORDINATOR, msgspec.convert(said["frame"], Frame))
            elif said is not None and said["kind"] == "placed":
                self.placed[said["replica"]] = said["machine"]
            elif said is not None and said.get("number", math.inf) > self._evaluated:
                # Else a coordinator before this one has told it.
                self._evaluated = said.pop("number", self._evaluated)
                yield said

    def admit(self, placed: Placed) -> None:
        """The coordinator tells its own nursery where it is, as it tells others."""

    def forget(self, deputy: Node) -> None:
        """Whom its own nursery hears as any process."""

    def leave(self) -> None:
        self._pipe.connection.close()

    close = leave

    def give(self) -> ControlPipe:
        """The coordinator's end, in its process."""
        return ControlPipe(self._theirs)

    def given(self) -> None:
        """The coordinator is there."""
        self._theirs.close()


class StreamLine:
    """The coordinator is on another machine."""

    def __init__(self, site: Site) -> None:
        nursery = Node("nursery", site.machine)
        contexts = site.identity.issue(str(nursery)).contexts()
        part = Part(nursery, site, COMMON, _no_numbers)
        addresses = {COORDINATOR: site.addresses[COORDINATOR]}
        self._streams = Streams(contexts, part, addresses, plaintext=site.plaintext)

    open = True

    @property
    def sources(self) -> list[Any]:
        return [self._streams]

    @property
    def wake_at(self) -> float | None:
        at = self._streams.wake_at
        return None if at == math.inf else at

    def send(self, effect: Transmit) -> None:
        self._streams.send(effect.to, effect.frame, None)
        self._streams.turn(time.monotonic())

    def hear(self) -> Iterator[Event | dict[str, Any]]:
        self._streams.turn(time.monotonic())
        while (event := self._streams.take()) is not None:
            yield event

    def admit(self, placed: Placed) -> None:
        self._streams.admit(placed.node, placed.machine, placed.address)

    def forget(self, deputy: Node) -> None:
        self._streams.forget(deputy)

    def leave(self) -> None:
        """Forks have no part in streams."""

    def close(self) -> None:
        self._streams.close()


def _no_numbers(payload: Payload, peer: Node) -> Views:
    raise ValueError("a nursery has no numbers")
