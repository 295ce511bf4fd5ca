"""The memory of a large optimizer's state, taken from the kernel while replicas compute their first gradients.

The kernel clears what it gives, which takes longer than the first update itself.
"""

from __future__ import annotations

import torch

from squall.protocol.effects import Apply, Effect, Payload
from squall.protocol.events import Event
from squall.runtime.driver import Host, HostAround
from squall.runtime.job import Job
from squall.runtime.optimizers import state_vectors
from squall.runtime.processes import keep_freed_memory
from squall.strategies.work import Loop

LARGE = 1_000_000  # elements
BESIDE = 1_000_000  # elements: room for what else is allocated before the state is


def prepared(host: Host, job: Job, shard: int) -> Host:
    """The shard's host, in a process of its own; for a large network one that takes the memory."""
    start, stop = job.layout.shard_range(shard, job.recipe.shards)
    if stop - start < LARGE or not isinstance(job.recipe.work, Loop) or job.restored is not None:
        return host
    vectors = state_vectors(job.recipe.work.update.optimizer)
    if not vectors:
        return host
    keep_freed_memory()
    return FirstTouch(host, (stop - start) * vectors + BESIDE, job.recipe.replicas)


class FirstTouch(HostAround):
    """A host that takes memory for float32 elements when it first waits after so many payloads, and frees it.

    It does not where an update came before that: the optimizer has its memory then.
    """

    def __init__(self, host: Host, elements: int, payloads: int) -> None:
        super().__init__(host)
        self._elements = elements
        self._payloads = payloads

    def attach(self, payload: Payload) -> None:
        super().attach(payload)
        self._payloads -= 1

    def perform(self, effect: Effect, now: float) -> Event | None:
        if type(effect) is Apply:
            self._elements = 0
        return super().perform(effect, now)

    def rest(self) -> None:
        if self._elements and self._payloads <= 0:
            torch.zeros(self._elements)
            self._elements = 0
        super().rest()
