"""What a simulated cluster did: the coordinator's notes, added up."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from squall.protocol.effects import Effect, End, PublishSnapshot
from squall.protocol.events import Event
from squall.protocol.notes import TargetReached, TrainingBegan, TrainingOver, WeightsMeasured, WorkReported
from squall.report.words import clock, number, percent, size, two_columns
from squall.runtime.driver import Host, HostAround


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Times are virtual seconds, except `wall_s`."""

    strategy: str
    replicas: int
    parts: int = 1  # of each replica
    shards: int
    status: str
    reason: str
    training_s: float
    examples: int  # trained, repeats counted once
    examples_per_second: float
    epochs: float
    updates: int  # of one shard
    idle: float  # share of the replicas' time that they waited
    shard_busy: float  # share of the time that shards worked, mean over shards
    staleness_mean: float | None
    staleness_max: int | None
    staleness: dict[int, int]  # updates -> pushes applied with it, over all shards
    bytes: int  # pushed and fetched
    bytes_per_second: float
    goodput: float  # share of the computed examples that were trained on; the rest was lost with a process, or dropped
    lost: int  # processes
    restarts: int  # of the whole run, from a snapshot
    metrics: dict[str, float]  # last value by name
    reached_s: float | None  # when `until` was reached
    messages: int
    wall_s: float
    run_directory: str | None = None

    def to_json_dict(self) -> dict[str, Any]:
        """In JSON's types; a number that JSON cannot hold becomes None."""
        return {key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in asdict(self).items()}  # fmt: skip

    def lines(self) -> list[tuple[str, str]]:
        """What each number is called, and the number, as people read it."""
        shards = f", {_count(self.shards, 'shard')}" if self.shards else ""
        parts = f" of {self.parts} parts" if self.parts > 1 else ""
        found = [("strategy", f"{self.strategy}, {_count(self.replicas, 'replica')}{parts}{shards}")]
        found += [("ended", f"{self.status}: {self.reason}")]
        found += [(name, number(value)) for name, value in self.metrics.items()]
        found += [
            ("virtual time", clock(self.training_s)),
            ("examples", f"{number(self.examples)} ({self.epochs:.3g} epochs)"),
            ("examples/s", number(self.examples_per_second)),
            ("updates", number(self.updates)),
            ("replicas wait", percent(self.idle, 1)),
            *([("shards work", percent(self.shard_busy, 1))] if self.shards else []),
            ("exchanged", f"{size(self.bytes)}, {size(round(self.bytes_per_second))}/s"),
        ]
        if self.staleness_mean is not None:
            found.append(("staleness", f"{self.staleness_mean:.2f} mean, {self.staleness_max} max"))
        lost = f"; processes lost: {self.lost}, restarts: {self.restarts}" if self.lost or self.restarts else ""
        found.append(("goodput", percent(self.goodput, 1) + lost))
        rate = self.messages / self.wall_s if self.wall_s else 0.0
        found.append(("simulated in", f"{clock(self.wall_s)}, {number(rate)} messages/s"))
        return found

    def __str__(self) -> str:
        return two_columns(self.lines())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


@dataclass
class Sums:
    """What the coordinator of a simulated run has noted, added up over the restarts."""

    compute_s: float = 0.0
    wait_s: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)
    metrics: dict[str, float] = field(default_factory=dict)
    began_s: float | None = None
    stopped_s: float | None = None
    reached_s: float | None = None
    published: PublishSnapshot | None = None
    end: End | None = None


class NotesWatch(HostAround):
    """The coordinator's host, which also adds up what the coordinator notes."""

    def __init__(self, sums: Sums, host: Host) -> None:
        super().__init__(host)
        self._sums = sums

    def perform(self, effect: Effect, now: float) -> Event | None:
        sums = self._sums
        match effect:
            case WorkReported(_, stats):
                sums.compute_s += stats.compute_s
                sums.wait_s += stats.wait_s
                sums.staleness.update(stats.staleness)
            case TrainingBegan() if sums.began_s is None:
                sums.began_s = now
            case TrainingOver():
                sums.stopped_s = now
            case TargetReached():
                sums.reached_s = now
            case WeightsMeasured(values):
                sums.metrics.update(values)
            case PublishSnapshot():
                sums.published = effect
            case End():
                sums.end = effect
        return super().perform(effect, now)
