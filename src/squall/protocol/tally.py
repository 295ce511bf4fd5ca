"""Sums of what a replica did, for its next report."""

from __future__ import annotations

from squall.protocol.messages import Stats


class Tally:
    """Sums for the next report."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.examples = self.batches = self.exchanges = self.pushes = self.fetches = 0
        self.loss_sum = self.compute_s = self.wait_s = 0.0
        self.staleness: dict[int, int] = {}

    def add(self, examples: int, loss: float) -> None:
        self.examples += examples
        self.batches += 1
        self.loss_sum += examples * loss

    def stale(self, staleness: int) -> None:
        self.staleness[staleness] = self.staleness.get(staleness, 0) + 1

    def take(self) -> Stats:
        stats = Stats(
            self.examples, self.batches, self.loss_sum, self.compute_s, self.wait_s,
            self.exchanges, self.pushes, self.fetches, self.staleness,
        )  # fmt: skip
        self._clear()
        return stats
