"""Sums of what a replica did, for its next report."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping

import msgspec

from squall.protocol.messages import Cover, Extras, Factors, Stats, covered


class PushedWork(msgspec.Struct, frozen=True, gc=False):
    """What is behind a push."""

    examples: int = 0
    batches: int = 0
    loss_sum: float = 0.0  # over batches: mean loss x examples
    covers: tuple[Cover, ...] = ()
    factors: Factors = ()  # of the newest batch
    extras: Extras | None = None

    def and_batch(
        self, cover: Cover, examples: int, loss: float, factors: Factors, extras: Mapping[str, float] | None = None
    ) -> PushedWork:
        covers = covered(self.covers, (cover,))
        found = self.extras
        if extras:
            found = added(found or {}, {name: (value * examples, examples) for name, value in extras.items()})
        loss_sum = self.loss_sum + examples * loss
        return PushedWork(self.examples + examples, self.batches + 1, loss_sum, covers, factors, found)

    def and_step(self, factors: Factors) -> PushedWork:
        """A further step on a batch that is counted already."""
        return msgspec.structs.replace(self, batches=self.batches + 1, factors=factors)

    def and_none_of(self, cover: Cover) -> PushedWork:
        """The batch was left out."""
        return msgspec.structs.replace(self, covers=covered(self.covers, (cover,)))


NO_WORK = PushedWork()


def added(first: Extras, second: Extras) -> Extras:
    """The sums of both."""
    found = dict(first)
    for name, (total, examples) in second.items():
        before = found.get(name, (0.0, 0))
        found[name] = (before[0] + total, before[1] + examples)
    return found


class ReportSums:
    """Sums for the next report. Thousands are simulated at once, so they are kept small."""

    __slots__ = (
        "batches", "compute_s", "examples", "exchanges", "extras", "fetches", "loss_sum", "pushes", "staleness",
        "wait_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.examples = self.batches = self.exchanges = self.pushes = self.fetches = 0
        self.loss_sum = self.compute_s = self.wait_s = 0.0
        self.staleness = array("i")  # of each push at each shard
        self.extras: Extras | None = None

    def add(self, work: PushedWork) -> None:
        self.examples += work.examples
        self.batches += work.batches if work.examples else 0
        self.loss_sum += work.loss_sum
        if work.extras:
            self.extras = added(self.extras or {}, work.extras)

    def take(self) -> Stats:
        stats = Stats(
            self.examples, self.batches, self.loss_sum, self.compute_s, self.wait_s,
            self.exchanges, self.pushes, self.fetches, dict(Counter(self.staleness)),
            self.extras or {},
        )  # fmt: skip
        self._clear()
        return stats
