"""What another part of a replica on several machines exchanges with the shards, by a thread beside its computing."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from squall.parts.host import Ends
from squall.parts.neighbours import NeighbourLost
from squall.protocol.effects import Effect, Payload, UseWeights
from squall.protocol.events import Event, PushAsked
from squall.protocol.machine import Refusal
from squall.protocol.nodes import shard_nodes
from squall.runtime.arena import Arena
from squall.runtime.driver import Driver, Host
from squall.runtime.job import Job
from squall.runtime.ranges import Elements


class PartExchanges(Host):
    """The host of the part's machine. `push` and `fetched` are for the thread that computes, all else for the other.

    The part's buffers are its own. Shards on its machine look for gradients in that one's arena, and put weights there.
    """

    def __init__(self, job: Job, slot: int, part: int, machines: Arena, watch: Ends) -> None:
        """`machines` is the arena of its machine; `watch` is over the connections to the other parts."""
        assert job.site is not None
        self._job, self._slot, self._part, self._machines = job, slot, part, machines
        self._here = {shard.index for shard in shard_nodes(job.recipe.shards) if job.site.has(shard)}
        self._asked: deque[PushAsked] = deque()
        self._used: deque[int] = deque()  # buffers of weights that have come
        self._ask = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._came = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)  # as often as weights have
        self._waited = select.poll()
        for descriptor in (self._came, watch.fileno()):
            self._waited.register(descriptor, select.POLLIN)

    def begin(self, driver: Driver, failing: Callable[[BaseException], None]) -> None:
        """`driver` has this as its host; what that raises is told at once."""

        def go() -> None:
            try:
                driver.run()
            except Refusal as refusal:  # a shard says what none would: nothing of it is the user's
                failing(NeighbourLost(str(refusal)))
            except BaseException as error:
                failing(error)

        threading.Thread(target=go, name="squall exchanges", daemon=True).start()

    def push(self, clock: int, buffer: int) -> None:
        """The gradient in the buffer goes to the shards; it must stay as it is until weights come that have it."""
        self._asked.append(PushAsked(clock, buffer))
        os.eventfd_write(self._ask, 1)

    def fetched(self, buffer: int) -> None:
        """Return when the weights are here that the replica uses next. Raises `NeighbourLost`."""
        self._waited.poll()
        try:
            os.eventfd_read(self._came)
        except BlockingIOError:
            raise NeighbourLost("another part of this replica has ended") from None
        if (came := self._used.popleft()) != buffer:
            raise NeighbourLost(f"shards have sent weights for buffer {came}, and buffer {buffer} is next")

    # ------------------------------------------------------------ the driver's

    @property
    def wakes(self) -> Sequence[int]:
        return (self._ask,)

    def poll(self) -> Event | None:
        if not self._asked:
            with suppress(BlockingIOError):
                os.eventfd_read(self._ask)
        return self._asked.popleft() if self._asked else None

    def attach(self, payload: Payload) -> None:
        if payload.shard in self._here:
            own, theirs = (a.gradient(self._slot, payload.buffer) for a in (self._job.arena, self._machines))
            _copy(self._job.ranges(payload), own, theirs)

    def perform(self, effect: Effect, now: float) -> Event | None:
        assert isinstance(effect, UseWeights), effect
        buffer, owner = effect.buffer, self._job.first
        assert owner is not None
        own, theirs = (a.weights(self._slot, buffer) for a in (self._job.arena, self._machines))
        for shard in self._here:
            payload = Payload("weights", owner.node, buffer, 0, shard, part=self._part)
            _copy(self._job.ranges(payload), theirs, own)
            self._job.arena.rates(self._slot, buffer).copy_(self._machines.rates(self._slot, buffer))
        self._used.append(buffer)
        os.eventfd_write(self._came, 1)
        return None


def _copy(some: Elements, source: Tensor, target: Tensor) -> None:
    for there, own in zip(some.of(target), some.of(source)):
        there.copy_(own)
