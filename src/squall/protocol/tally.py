"""Sums of what a replica did, for its next report."""

from __future__ import annotations

from typing import NamedTuple

from squall.protocol.messages import Stats


class Work(NamedTuple):
    """What is behind a push."""

    examples: int = 0
    batches: int = 0
    loss_sum: float = 0.0  # over batches: mean loss x examples

    def and_batch(self, examples: int, loss: float) -> Work:
        return Work(self.examples + examples, self.batches + 1, self.loss_sum + examples * loss)


class Tally:
    """Sums for the next report."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.examples = self.batches = self.exchanges = self.pushes = self.fetches = 0
        self.loss_sum = self.compute_s = self.wait_s = 0.0
        self.staleness: dict[int, int] = {}

    def add(self, work: Work) -> None:
        self.examples += work.examples
        self.batches += work.batches
        self.loss_sum += work.loss_sum

    def stale(self, staleness: int) -> None:
        self.staleness[staleness] = self.staleness.get(staleness, 0) + 1

    def take(self) -> Stats:
        stats = Stats(
            self.examples, self.batches, self.loss_sum, self.compute_s, self.wait_s,
            self.exchanges, self.pushes, self.fetches, self.staleness,
        )  # fmt: skip
        self._clear()
        return stats
