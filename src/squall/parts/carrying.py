"""The hosts of a replica whose parts have no memory in common, because they lie on several machines.

Each part has the replica's buffers by itself, uses what it reads and writes of them, and exchanges that with the shards
(`parts.exchanging`); the first part says when, and waits for the others. What one part steps and another reads goes
through the first part after every step.
"""

from __future__ import annotations

import mmap
import os
import select

from squall.parts.exchanging import PartExchanges
from squall.parts.host import Collect, Speaker
from squall.parts.neighbours import Neighbours
from squall.parts.passing import Passing
from squall.protocol.effects import Compute, Effect, Payload, UseWeights
from squall.protocol.events import Event
from squall.runtime.arena import Arena, Shape
from squall.runtime.driver import Host, HostAround
from squall.runtime.hosts import ReplicaHost
from squall.runtime.job import Job

MAP_NORESERVE = 0x4000  # Linux; `mmap` has no name for it before Python 3.13


def own_arena(shape: Shape) -> Arena:
    """For a part with no memory of part 0's: it takes as much as is used of it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE  # all replicas' slots may be more than there is
    return Arena(shape, mmap.mmap(-1, shape.total_bytes, flags=flags))


class PassingHost(HostAround):
    """Of any part: what it steps itself goes to those who read it."""

    def __init__(self, host: Host, neighbours: Neighbours, job: Job, slot: int) -> None:
        super().__init__(host)
        self._passing = Passing(neighbours, job)
        self._arena, self._slot, self._own = job.arena, slot, job.own
        self._used = 0  # the weights buffer that is computed on, where the replica has no weights of its own

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, Collect):
            return None
        if isinstance(effect, UseWeights):
            self._used = effect.buffer
        event = super().perform(effect, now)
        if self._own is not None and isinstance(effect, UseWeights | Compute):
            self._passing.share_steps(self._own)
        elif isinstance(effect, Compute) and effect.local_step:
            self._passing.share_steps(self._arena.weights(self._slot, self._used))
        return event


class FarHost(HostAround):
    """Of another part than the first: it exchanges by itself."""

    def __init__(
        self, host: Host, neighbours: Neighbours, job: Job, slot: int, exchanges: PartExchanges
    ) -> None:  # fmt: skip
        super().__init__(PassingHost(host, neighbours, job, slot))
        self._replica = host if job.own is not None else None  # with weights of its own
        self._spent, self._exchanges = neighbours.spent, exchanges

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, Collect):
            self._exchanges.push(effect.clock, effect.buffer)
        if isinstance(effect, UseWeights):
            with self._spent.waiting():
                self._exchanges.fetched(effect.buffer)
        event = super().perform(effect, now)
        if isinstance(effect, UseWeights) and isinstance(self._replica, ReplicaHost):
            self._replica.training.backward.on_vector.use(0)  # with buffers that another part has fetched
        return event


class SpreadSpeaker(Speaker):
    """The others are told to push as well when it is about to."""

    def __init__(self, host: Host, neighbours: Neighbours, watch: ConnectionWatch) -> None:
        super().__init__(host, neighbours, own_weights=True, watch=watch)  # weights that are fetched are waited for
        self._clock = -1  # of the last push

    def attach(self, payload: Payload) -> None:
        if payload.kind == "gradient" and payload.clock != self._clock:  # once for all shards
            self._clock = payload.clock
            self.perform(Collect(payload.clock, payload.buffer), 0.0)
        super().attach(payload)


class ConnectionWatch:
    """Of a part over its connections to others, by an eventfd that is written to when one has broken."""

    def __init__(self) -> None:
        self.news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self.news, select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def ended(self) -> bool:
        return bool(self._epoll.poll(0))

    def close(self) -> None:
        """They may end. Who waits for the descriptor goes on to, in vain."""
        self._epoll.unregister(self.news)
