"""The hosts of a replica's parts: the first is told by the replica's machine, and the others by the first.

Each part has a host of the same kind, on what it reads and writes of the replica's buffers. So all parts carry out the
same effects in the same order, and what an effect has led to is complete when the first one's is.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Protocol

import msgspec
from msgspec.structs import replace

from squall.parts.neighbours import NeighbourLost, Neighbours
from squall.parts.spent import measured
from squall.protocol.effects import (
    Compute,
    CutGroup,
    Effect,
    End,
    Expect,
    JoinGroup,
    Keep,
    LeaveGroup,
    PreparePush,
    Step,
    UseWeights,
    WriteSnapshot,
)
from squall.protocol.events import Event, GradientComputed, StepTaken
from squall.runtime.driver import Host, HostAround


class Collect(Effect, frozen=True, gc=False):
    """Bring your own of this buffer to where all of it is wanted, where the parts have no memory in common."""

    clock: int  # of the push, or of what is shown
    buffer: int


KINDS: tuple[type[Effect], ...] = (
    Compute, Keep, PreparePush, UseWeights, Expect, End, JoinGroup, LeaveGroup, Step, WriteSnapshot, Collect,
)  # fmt: skip
PUT_OFF = (UseWeights, Expect)  # nothing comes of these before another effect does
MOST_PUT_OFF = 16


class Ends(Protocol):
    """What tells part 0 that another part has ended. Its descriptor is readable then."""

    def fileno(self) -> int: ...

    def ended(self) -> bool: ...

    def close(self) -> None: ...  # they may end


class Watch:
    """Of part 0 over the processes of the others. Its descriptor is readable when one of them has ended."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = pids
        self._epoll = select.epoll()
        self._handles = [os.pidfd_open(pid) for pid in pids]
        for handle in self._handles:
            self._epoll.register(handle, select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def ended(self) -> bool:
        return bool(self._epoll.poll(0))

    def close(self) -> None:
        """They may end. Who waits for the descriptor goes on to, in vain."""
        for handle in self._handles:
            self._epoll.unregister(handle)  # processes that were forked meanwhile hold it open
            os.close(handle)
        self._handles = []


class Speaker(HostAround):
    """Of part 0, where the replica's machine is."""

    def __init__(
        self, host: Host, neighbours: Neighbours, own_weights: bool = False, watch: Ends | None = None
    ) -> None:  # fmt: skip
        """`own_weights`: fetched weights are copied into the replica's own, which all parts compute on."""
        super().__init__(host)
        self._watch = watch
        self._neighbours = neighbours
        self._later = (Expect,) if own_weights else PUT_OFF
        self._put_off: list[Effect] = []

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, CutGroup):  # while another thread is at work here
            return super().perform(effect, now)
        with self._neighbours.together():
            with self._neighbours.spent.at_work():
                event = self._perform(effect, now)
            if isinstance(event, StepTaken):
                self._neighbours.spent.look()  # the next step may be there already, so that there is no rest
            if isinstance(event, GradientComputed | StepTaken):
                event = replace(event, inside=measured(self._neighbours.spent, self._neighbours.others.values()))
            return event

    def poll(self) -> Event | None:
        """Raises `NeighbourLost` where another part has ended, though it was told nothing."""
        if self._watch is not None and self._watch.ended():
            with self._neighbours.together():
                raise NeighbourLost("another part of this replica has ended")
        return super().poll()

    def rest(self) -> None:
        self._neighbours.spent.look()
        super().rest()

    def _perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, End):
            if self._watch is not None:
                self._watch.close()
            with suppress(NeighbourLost):  # who ends need not be told to
                self._neighbours.tell(_encoded([End("")]))
            return super().perform(effect, now)
        if type(effect) not in KINDS:
            return super().perform(effect, now)
        self._put_off.append(effect)
        if isinstance(effect, self._later) and len(self._put_off) < MOST_PUT_OFF:
            return super().perform(effect, now)
        self._neighbours.tell(_encoded(self._put_off))
        self._put_off = []
        event = super().perform(effect, now)
        self._neighbours.done()  # the others have written what they had to
        return event


def follow(host: Host, neighbours: Neighbours, rounds: int | None = None) -> None:
    """Carry out what the first part is told, until the replica ends, or so many times.

    Raises `NeighbourLost` where another part has failed.
    """
    with neighbours.together():
        for _ in count() if rounds is None else range(rounds):
            effects = _decoded(neighbours.hear())
            with neighbours.spent.at_work():
                for effect in effects:
                    host.perform(effect, 0.0)
                    if isinstance(effect, End):
                        return
            neighbours.done()
            neighbours.spent.look()
            host.rest()


def _encoded(effects: list[Effect]) -> bytes:
    return msgspec.msgpack.encode([[KINDS.index(type(effect)), *msgspec.structs.astuple(effect)] for effect in effects])


def _decoded(text: bytes) -> list[Effect]:
    """Raises `NeighbourLost` for what the first part does not say."""
    try:
        told = ((KINDS[kind], values) for kind, *values in msgspec.msgpack.decode(text))
        return [msgspec.convert(dict(zip(kind.__struct_fields__, values)), kind) for kind, values in told]
    except (msgspec.MsgspecError, IndexError, TypeError, ValueError) as error:
        raise NeighbourLost(f"the first part of this replica says what is no effect: {error}") from error
