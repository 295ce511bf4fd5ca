"""What a running training has done, kept up to date by what is new in its record."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from squall.protocol.nodes import Node
from squall.record.rows import ActivityRow, EventRow, MemberRow, MetricRow, ProgressRow, Row, StalenessRow, StateRow
from squall.report.activity import Activity
from squall.report.words import trains

RECENT_S = 10.0  # rates and losses are means over this much training time


@dataclass
class ReplicaTally:
    """One replica: what it did in all, and its reports of the last `RECENT_S`."""

    examples: int = 0
    staleness_max: int | None = None
    work: deque[ProgressRow] = field(default_factory=deque)
    pushes: deque[StalenessRow] = field(default_factory=deque)

    def forget(self, before_s: float) -> None:
        """Let go of reports up to `before_s`, but never of the latest: slow replicas keep their numbers."""
        while len(self.work) > 1 and self.work[0].time_s <= before_s:
            self.work.popleft()
        while len(self.pushes) > 1 and self.pushes[0].time_s <= before_s:
            self.pushes.popleft()


class Totals:
    """Totals and recent means over a run."""

    def __init__(self) -> None:
        self.state: dict[str, str] = {}
        self.metrics: dict[str, MetricRow] = {}  # name -> last result
        self.events: deque[EventRow] = deque(maxlen=2)
        self.replicas: dict[int, ReplicaTally] = {}
        self.time_s = 0.0  # training time of the last report
        self.batches = 0
        self.activity = Activity()
        self._present: set[str] = set()  # processes that have joined, and are not gone

    def take(self, rows: Iterable[Row]) -> None:
        """Rows that were not there before."""
        for row in rows:
            match row:
                case StateRow(key, value):
                    self.state[key] = value
                case MetricRow():
                    self.metrics[row.name] = row
                case ProgressRow():
                    replica = self.replicas.setdefault(row.replica, ReplicaTally())
                    replica.examples += row.examples
                    replica.work.append(row)
                    self.batches += row.batches
                    self.time_s = max(self.time_s, row.time_s)
                case StalenessRow():
                    replica = self.replicas.setdefault(row.replica, ReplicaTally())
                    replica.staleness_max = max(row.staleness, replica.staleness_max or 0)
                    replica.pushes.append(row)
                case ActivityRow():
                    self.activity.take(row)
                case MemberRow():
                    (self._present.add if row.change == "joined" else self._present.discard)(row.node)
                case EventRow():
                    self.events.append(row)
        for replica in self.replicas.values():
            replica.forget(self.time_s - RECENT_S)

    @property
    def examples(self) -> int:
        return sum(replica.examples for replica in self.replicas.values())

    @property
    def reports(self) -> dict[int, float]:
        """Living replica -> training time of its last report."""
        nodes = map(Node.parse, self._present)
        training = {node.index for node in nodes if node.role == "replica"} & self.replicas.keys()
        return {index: work[-1].time_s for index in training if (work := self.replicas[index].work)}

    def rate(self, replicas: Iterable[ReplicaTally]) -> float:
        """Examples per second of training time that these replicas trained lately, together."""
        span = min(self.time_s, RECENT_S)
        since = self.time_s - span
        done = sum(row.examples for replica in replicas for row in replica.work if row.time_s > since)
        return done / span if span > 0 else 0.0

    @property
    def trains(self) -> bool:
        """Whether it moves weights, and does not just answer."""
        return trains(self.state)

    def limit(self) -> tuple[str, float, float]:
        """What bounds the run: its name, how much of it is done, and how much there is (NaN: unknown)."""
        epochs, size = self._number("epochs"), self._number("examples_per_epoch")
        if not self.trains:
            return "example", self.examples + self._number("found"), size
        if epochs > 0 and size > 0:
            return "epoch", min(self.examples / size, epochs), epochs
        for name, done in (("step", float(self.batches)), ("second", self.time_s)):
            total = self._number(name + "s")
            if total > 0:
                return name, min(done, total), total
        return "step", float(self.batches), math.nan

    def _number(self, key: str) -> float:
        try:
            return float(self.state[key])
        except (KeyError, ValueError):  # not written yet, or a word such as "unlimited"
            return math.nan


def loss(replicas: Iterable[ReplicaTally]) -> float:
    """Mean training loss per example of the recent reports."""
    return _mean((row.loss, row.examples) for replica in replicas for row in replica.work)


def staleness(replicas: Iterable[ReplicaTally]) -> float:
    """Mean staleness, in updates, of the recent pushes."""
    return _mean((row.staleness, row.count) for replica in replicas for row in replica.pushes)


def waiting(replicas: Iterable[ReplicaTally]) -> float:
    """Part of the recent time that was spent waiting, 0 to 1."""
    rows = [row for replica in replicas for row in replica.work]
    waited = sum(row.wait_s for row in rows)
    spent = waited + sum(row.compute_s for row in rows)
    return waited / spent if spent > 0 else math.nan


def _mean(weighted: Iterable[tuple[float, int]]) -> float:
    total = weight = 0.0
    for value, count in weighted:
        if not math.isnan(value):  # not known: of a replica that died before it could tell
            total += value * count
            weight += count
    return total / weight if weight > 0 else math.nan
