"""What a replica tells the coordinator of its work, and when."""

from __future__ import annotations

import math

from squall.protocol.messages import Cover, Left, Progress, covered
from squall.protocol.report_sums import PushedWork, ReportSums

REPORT_EVERY_S = 0.25
REPORT_LEASES = 16  # unreported ones at most; shards remember more (`shard.LEASES_KEPT`)


class Reports:
    __slots__ = ("_at", "_from", "covers", "tally")

    def __init__(self) -> None:
        self.covers: tuple[Cover, ...] = ()  # applied by all shards, and not told yet
        self.tally = ReportSums()
        self._at = 0.0
        self._from = math.inf  # clock of a push with the last of an epoch: the report behind it does not wait

    def applied(self, work: PushedWork) -> None:
        """By all shards."""
        self.covers = covered(self.covers, work.covers)
        self.tally.add(work)

    def epoch_ends(self, clock: int) -> None:
        """With the push of this clock, so that the epoch's evaluation does not wait for the next report."""
        self._from = min(self._from, clock)

    def due(self, clock: int, now: float, at_once: bool) -> Progress | None:
        """The report, if it is time for one."""
        epoch_over = clock >= self._from
        if not self.covers or not (at_once or epoch_over or now >= self._at or len(self.covers) >= REPORT_LEASES):
            return None
        self._at = now + REPORT_EVERY_S
        if epoch_over:
            self._from = math.inf
        return Progress(self._taken(), self.tally.take())

    def last(self) -> Left:
        return Left(self._taken(), self.tally.take())

    def _taken(self) -> tuple[Cover, ...]:
        covers, self.covers = self.covers, ()
        return covers
