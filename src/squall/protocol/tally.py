"""Sums of what a replica did, for its next report."""

from __future__ import annotations

from array import array
from collections import Counter

import msgspec

from squall.protocol.messages import Cover, Factors, Stats, covered


class Work(msgspec.Struct, frozen=True, gc=False):
    """What is behind a push."""

    examples: int = 0
    batches: int = 0
    loss_sum: float = 0.0  # over batches: mean loss x examples
    covers: tuple[Cover, ...] = ()
    factors: Factors = ()  # of the newest batch

    def and_batch(self, cover: Cover, examples: int, loss: float, factors: Factors) -> Work:
        covers = covered(self.covers, (cover,))
        return Work(self.examples + examples, self.batches + 1, self.loss_sum + examples * loss, covers, factors)

    def and_none_of(self, cover: Cover) -> Work:
        """The batch was left out."""
        return msgspec.structs.replace(self, covers=covered(self.covers, (cover,)))


NO_WORK = Work()


class Tally:
    """Sums for the next report. Thousands are simulated at once, so they are kept small."""

    __slots__ = (
        "batches", "compute_s", "examples", "exchanges", "fetches", "loss_sum", "pushes", "staleness", "wait_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.examples = self.batches = self.exchanges = self.pushes = self.fetches = 0
        self.loss_sum = self.compute_s = self.wait_s = 0.0
        self.staleness = array("i")  # of each push at each shard

    def add(self, work: Work) -> None:
        self.examples += work.examples
        self.batches += work.batches
        self.loss_sum += work.loss_sum

    def take(self) -> Stats:
        stats = Stats(
            self.examples, self.batches, self.loss_sum, self.compute_s, self.wait_s,
            self.exchanges, self.pushes, self.fetches, dict(Counter(self.staleness)),
        )  # fmt: skip
        self._clear()
        return stats
