"""What a replica tells the coordinator of its work, and when."""

from __future__ import annotations

import math
from array import array
from collections import Counter

import msgspec
from msgspec.structs import astuple

from squall.protocol.events import GradientComputed
from squall.protocol.messages import Cover, Extras, Left, Progress, Stats
from squall.protocol.pushed_work import PushedWork, added, covered

REPORT_EVERY_S = 0.25
REPORT_LEASES = 16  # with so many unreported leases a report is due; shards remember more (`shard.LEASES_KEPT`)


class ReportSums:
    """Sums for the next report. Thousands are simulated at once, so they are kept small."""

    __slots__ = (
        "batches", "compute_s", "examples", "exchanges", "extras", "fetches", "inside", "loss_sum", "pushes",
        "staleness", "wait_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.examples = self.batches = self.exchanges = self.pushes = self.fetches = 0
        self.loss_sum = self.compute_s = self.wait_s = 0.0
        self.staleness = array("i")  # of each push at each shard
        self.extras: Extras | None = None
        self.inside: tuple[float, ...] = ()

    def computed(self, event: GradientComputed) -> None:
        self.compute_s += event.seconds
        self.inside = event.inside

    def add(self, work: PushedWork) -> None:
        self.examples += work.examples
        self.batches += work.batches if work.examples else 0
        self.loss_sum += work.loss_sum
        if work.extras:
            self.extras = added(self.extras or {}, work.extras)

    def take(self, clock: int = 0) -> Stats:
        stats = Stats(
            self.examples, self.batches, self.loss_sum, self.compute_s, self.wait_s,
            self.exchanges, self.pushes, self.fetches, dict(Counter(self.staleness)),
            self.extras or {}, self.inside, max(0, clock),
        )  # fmt: skip
        self._clear()
        return stats


def together(first: Stats, second: Stats) -> Stats:
    """What both tell, as one report."""
    sums = [a + b for a, b in zip(astuple(first)[:-4], astuple(second)[:-4])]
    staleness = dict(Counter(first.staleness) + Counter(second.staleness))
    inside = second.inside or first.inside
    clock = max(first.clock, second.clock)
    return msgspec.convert([*sums, staleness, added(first.extras, second.extras), inside, clock], Stats)


class Reports:
    __slots__ = ("_at", "_from", "covers", "tally")

    def __init__(self) -> None:
        self.covers: tuple[Cover, ...] = ()  # applied by all shards, and not told yet
        self.tally = ReportSums()
        self._at = 0.0
        self._from = math.inf  # clock of the push that ends an epoch: it is reported at once

    def applied(self, work: PushedWork) -> None:
        """All shards have applied a push."""
        self.covers = covered(self.covers, work.covers)
        self.tally.add(work)

    def epoch_ends(self, clock: int) -> None:
        """The push of this clock ends an epoch. It is reported at once, because the epoch's evaluation waits for it."""
        self._from = min(self._from, clock)

    def due(self, clock: int, now: float, at_once: bool) -> Progress | None:
        """The report, if it is time for one."""
        epoch_over = clock >= self._from
        if not self.covers or not (at_once or epoch_over or now >= self._at or len(self.covers) >= REPORT_LEASES):
            return None
        self._at = now + REPORT_EVERY_S
        if epoch_over:
            self._from = math.inf
        return Progress(self._taken(), self.tally.take(clock))

    def last(self, clock: int) -> Left:
        return Left(self._taken(), self.tally.take(clock))

    def _taken(self) -> tuple[Cover, ...]:
        covers, self.covers = self.covers, ()
        return covers
