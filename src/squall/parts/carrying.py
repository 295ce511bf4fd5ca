"""What travels inside a replica whose parts have no memory in common, because they lie on several machines.

Shards put weights into the arena of part 0's machine and find gradients there. Each other part has the same buffers by
itself, and uses what it reads and writes of them. Weights go out to it when they have been fetched, and its gradient
comes in before it is pushed. What one part steps and another reads goes through part 0 after every step.
"""

from __future__ import annotations

import mmap
import os
import select
from abc import abstractmethod
from collections.abc import Iterable

from torch import Tensor

from squall.parts.host import Collect, Speaker
from squall.parts.neighbours import SPEAKER, Neighbours
from squall.parts.passing import Share, hear, receive, say, sending
from squall.protocol.effects import Compute, Effect, Keep, Payload, PreparePush, UseWeights
from squall.protocol.events import Event
from squall.runtime.arena import Arena, Shape
from squall.runtime.driver import Host, HostAround
from squall.runtime.hosts import ReplicaHost
from squall.runtime.job import Job
from squall.vector import Layout

MAP_NORESERVE = 0x4000  # Linux; `mmap` has no name for it before Python 3.13


def own_arena(shape: Shape) -> Arena:
    """For a part with no memory of part 0's: it takes as much as is used of it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE  # all replicas' slots may be more than there is
    return Arena(shape, mmap.mmap(-1, shape.total_bytes, flags=flags))


class _Carrying(HostAround):
    """One end, of the replica in a slot."""

    def __init__(self, host: Host, neighbours: Neighbours, job: Job, slot: int) -> None:
        super().__init__(host)
        assert job.inside is not None
        self._neighbours = neighbours
        self._layout, self._arena, self._slot, self._own = job.layout, job.arena, slot, job.own
        self._used = 0  # the weights buffer that is computed on, where the replica has no weights of its own
        self._introduce(Share.of(job.inside))

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, Collect):
            self._collect(self._arena.gradient(self._slot, effect.buffer))
            return None
        if isinstance(effect, UseWeights):
            self._used = effect.buffer
            self._fetch([self._arena.rates(self._slot, effect.buffer)], self._arena.weights(self._slot, effect.buffer))
        event = super().perform(effect, now)
        if self._own is not None and isinstance(effect, UseWeights | Compute):
            self._share_steps(self._own)
        elif isinstance(effect, Compute) and effect.local_step:
            self._share_steps(self._arena.weights(self._slot, self._used))
        return event

    @abstractmethod
    def _introduce(self, own: Share) -> None: ...  # who has which part of the vector

    @abstractmethod
    def _fetch(self, rates: list[Tensor], weights: Tensor) -> None: ...

    @abstractmethod
    def _collect(self, gradient: Tensor) -> None: ...

    @abstractmethod
    def _share_steps(self, weights: Tensor) -> None: ...

    def _fetched(self, share: Share) -> Layout:
        """A replica with weights of its own moves what it writes towards those that it has fetched."""
        return share.read(self._layout) if self._own is None else share.written(self._layout)


class FirstHost(_Carrying):
    """Of part 0, in whose arena the shards see the replica."""

    def _introduce(self, own: Share) -> None:
        others = [other for other in range(self._neighbours.parts) if other != SPEAKER]
        shares = {other: hear(self._neighbours, other, Share) for other in others}
        lacking = own.lacks().union(*(share.lacks() for share in shares.values()))
        self._shares = {other: (self._fetched(share), share.written(self._layout)) for other, share in shares.items()}
        self._lent = {other: self._layout.share(lacking.intersection(share.writes)) for other, share in shares.items()}
        self._lacking = {other: self._layout.share(share.lacks()) for other, share in shares.items()}
        for other in others:
            say(self._neighbours, sorted(lacking.intersection(shares[other].writes)), other)

    def _fetch(self, rates: list[Tensor], weights: Tensor) -> None:
        self._give({o: [*rates, *fetched.regions(weights)] for o, (fetched, _) in self._shares.items()})

    def _collect(self, gradient: Tensor) -> None:
        for other, (_, written) in self._shares.items():
            receive(self._neighbours, written.regions(gradient), other)

    def _share_steps(self, weights: Tensor) -> None:
        for other, lent in self._lent.items():
            receive(self._neighbours, lent.regions(weights), other)
        self._give({other: lacking.regions(weights) for other, lacking in self._lacking.items()})

    def _give(self, tensors: dict[int, list[Tensor]]) -> None:
        on_way = [wait for other, given in tensors.items() for wait in sending(self._neighbours, given, other)]
        for wait in on_way:
            wait()


class FarHost(_Carrying):
    """Of another part."""

    def perform(self, effect: Effect, now: float) -> Event | None:
        event = super().perform(effect, now)
        if isinstance(effect, UseWeights) and self._own is not None:
            assert isinstance(self._host, ReplicaHost)
            self._host.training.backward.on_vector.use(0)  # with buffers that another part has fetched
        return event

    def _introduce(self, own: Share) -> None:
        say(self._neighbours, own, SPEAKER)
        self._reads, self._writes = self._fetched(own), own.written(self._layout)
        self._lacks = self._layout.share(own.lacks())
        self._lent = self._layout.share(set(hear(self._neighbours, SPEAKER, list[str])))

    def _fetch(self, rates: list[Tensor], weights: Tensor) -> None:
        receive(self._neighbours, [*rates, *self._reads.regions(weights)], SPEAKER)

    def _collect(self, gradient: Tensor) -> None:
        self._give(self._writes.regions(gradient))

    def _share_steps(self, weights: Tensor) -> None:
        self._give(self._lent.regions(weights))
        receive(self._neighbours, self._lacks.regions(weights), SPEAKER)

    def _give(self, tensors: Iterable[Tensor]) -> None:
        for wait in sending(self._neighbours, tensors, SPEAKER):
            wait()


class SpreadSpeaker(Speaker):
    """The others are told to bring what they have of a gradient when it is about to be pushed."""

    def __init__(self, host: Host, neighbours: Neighbours, watch: ConnectionWatch) -> None:
        super().__init__(host, neighbours, own_weights=True, watch=watch)  # weights that are fetched are sent at once
        self._written: set[int] = set()  # buffers of which the others have something new

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, Compute | Keep | PreparePush):
            self._written.add(effect.buffer)
        return super().perform(effect, now)

    def attach(self, payload: Payload) -> None:
        if payload.kind == "gradient" and payload.buffer in self._written:
            self._written.remove(payload.buffer)
            self.perform(Collect(payload.buffer), 0.0)
        super().attach(payload)


class ConnectionWatch:
    """Of part 0 over its connections to the others, by an eventfd that is written to when one has broken."""

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
