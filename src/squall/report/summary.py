"""A run in a dozen numbers."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from html import escape
from typing import Any

import msgspec

from squall.protocol.best import better
from squall.record.inventory import Inventory
from squall.record.rows import EventRow, MemberRow, MetricRow
from squall.report.parts import PartShare, bubble_text, parts_of, parts_table
from squall.report.reader import Reader
from squall.report.words import clock, number, percent, plural, size, trains, two_columns


@dataclass(frozen=True)
class Summary:
    """What came out of a run; None where the record does not say."""

    strategy: str
    optimizer: str | None  # with its learning rate
    status: str
    ended: str | None  # why it is over: a `protocol.effects.Cause`
    reason: str | None  # the same in words
    diverged: str | None  # how the loss has grown, where it has, and the remedy
    metrics: dict[str, float]  # last value by name
    extras: dict[str, float]  # beside the training loss: their means over the last tenth of the training time
    first_step_s: float | None  # from the command to the first training step
    training_s: float
    examples: int
    examples_per_second: float
    staleness_mean: float | None  # updates, over all pushes
    staleness_max: int | None
    updates: int | None
    exchanged_bytes: int  # pushed and fetched by all replicas
    shares: dict[int, float]  # replica -> part of all examples, adding up to 1
    machines: dict[int, list[int]] = field(default_factory=dict)  # bytes sent and received, where there are several
    inventory: Inventory = field(default_factory=Inventory)  # what ran where at the last beginning
    pauses: list[tuple[float, str]] = field(default_factory=list)  # seconds without training as it moved, and why
    best: dict[str, float] = field(default_factory=dict)  # of the metric whose best weights are kept
    parts: list[PartShare] = field(default_factory=list)  # of replicas of several processes
    least_bubble: float | None = None  # of a pipeline with equal stages and no transfers, 0 to 1
    trains: bool = True  # else it answers: `squall predict`
    found: int = 0  # examples that were answered before
    deaths: int = 0  # of processes
    given_back: int = 0  # examples of leases that ended before they were done, which are dealt again
    copying: float | None = None  # which part of their time shards waited for their backups, where they have such
    copied_bytes: int = 0  # sent to these, between machines

    def to_json_dict(self) -> dict[str, Any]:
        """The same in JSON's types; a number that JSON cannot hold (NaN, infinity) becomes None."""
        values: dict[str, Any] = json.loads(msgspec.json.encode(self))
        return values

    def lines(self) -> list[tuple[str, str]]:
        """What each number is called, and the number, as people read it."""
        why = f": {self.reason}" if self.reason and self.status in ("finished", "interrupted", "moved") else ""
        if not self.trains:
            return self._answered(why)
        found = [("strategy", self.strategy)]
        found += [("optimizer", self.optimizer)] if self.optimizer else []
        found += [("status", self.status + why)]
        found += [("diverged", self.diverged)] if self.diverged else []
        found += [(name, number(value)) for name, value in self.metrics.items()]
        found += [(f"{name} in training", number(value)) for name, value in self.extras.items()]
        found += [(f"best {name}", number(value)) for name, value in self.best.items()]
        found += [
            ("training time", clock(self.training_s)),
            ("until the first step", "unknown" if self.first_step_s is None else clock(self.first_step_s)),
            *(("pause", f"{clock(seconds)}: {why}") for seconds, why in self.pauses),
            ("examples", number(self.examples)),
            ("examples/s", number(self.examples_per_second)),
        ]
        if self.updates is not None:
            found.append(("updates", number(self.updates)))
        found.append(("exchanged", size(self.exchanged_bytes)))
        if self.copying is not None:
            sent = f", {size(self.copied_bytes)} of pushes sent on" if self.copied_bytes else ""
            found.append(("copies", f"shards waited {100 * self.copying:.1f} % of the time for theirs{sent}"))
        found += self._between()
        if bubble := bubble_text(self.parts, self.least_bubble):
            found.append(("bubble", bubble))
        if self.staleness_mean is not None:
            found.append(("staleness", f"{self.staleness_mean:.2f} mean, {self.staleness_max} max"))
        return found + self._share()

    def _answered(self, why: str) -> list[tuple[str, str]]:
        before = f", {number(self.found)} of them before" if self.found else ""
        again = f", {number(self.given_back)} examples were dealt again" if self.given_back else ""
        return [
            ("status", self.status + why),
            ("answered", plural(self.found + self.examples, "example") + before),
            ("time", clock(self.training_s)),
            ("until the first answer", "unknown" if self.first_step_s is None else clock(self.first_step_s)),
            ("examples/s", number(self.examples_per_second)),
            *([("deaths", number(self.deaths) + again)] if self.deaths else []),
            *self._between(),
            *self._share(),
        ]

    def _between(self) -> list[tuple[str, str]]:
        found = [
            (f"machine {machine}", f"sent {size(sent)}, received {size(received)}")
            for machine, (sent, received) in self.machines.items()
        ]
        plain = ("between machines", "plain text, readable on its way (--plaintext)")
        return [*found, plain] if self.inventory.plaintext else found

    def _share(self) -> list[tuple[str, str]]:
        shares = ", ".join(f"{replica}: {percent(share, 1)}" for replica, share in self.shares.items())
        return [("share of replica", shares)] if shares else []

    def __str__(self) -> str:
        return "\n".join([two_columns(self.lines()), *([parts_table(self.parts)] if self.parts else [])])

    def _repr_html_(self) -> str:
        """The table of a notebook."""
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self.lines())
        parts = f"<pre>{escape(parts_table(self.parts))}</pre>" if self.parts else ""
        return f"<table>{rows}</table>{parts}"


def summarize(reader: Reader) -> Summary:
    """Add a run up; of an unfinished run, what it has done so far."""
    state = reader.state()
    metrics = reader.metrics()
    examples: dict[int, int] = {}
    training_s, exchanged = 0.0, 0
    for work in reader.progress():
        examples[work.replica] = work.examples
        training_s = max(training_s, work.time_s)
        exchanged += work.pushed_bytes + work.fetched_bytes
    training_s = float(state.get("training_s") or training_s)
    total = sum(examples.values())
    pushes: dict[int, int] = defaultdict(int)  # staleness -> pushes
    for row in reader.staleness():
        pushes[row.staleness] += row.count
    extras = {name: curve[-1][1] for name, curve in reader.extras(max(training_s, 1e-9) / 10).items()}
    updates = state.get("updates") or max((metric.updates for metric in metrics.values()), default=None)
    first_step_s = state.get("first_step_s")
    return Summary(
        strategy=state.get("strategy", "unknown"),
        optimizer=state.get("optimizer"),
        status=state.get("status", "unknown"),
        ended=state.get("ended") or None,
        reason=state.get("reason") or None,
        diverged=state.get("diverged") or None,
        metrics={name: metric.value for name, metric in metrics.items()},
        extras=extras,
        first_step_s=float(first_step_s) if first_step_s else None,
        training_s=training_s,
        examples=total,
        examples_per_second=total / training_s if training_s > 0 else 0.0,
        staleness_mean=sum(s * n for s, n in pushes.items()) / sum(pushes.values()) if pushes else None,
        staleness_max=max(pushes, default=None),
        updates=None if updates is None else int(updates),
        exchanged_bytes=exchanged,
        shares={replica: examples[replica] / total for replica in sorted(examples)} if total else {},
        machines=msgspec.json.decode(state.get("traffic", "{}"), type=dict[int, list[int]]),
        inventory=msgspec.json.decode(state.get("inventory", "{}"), type=Inventory),
        pauses=msgspec.json.decode(state.get("pauses", "[]"), type=list[tuple[float, str]]),
        best=_best(reader, state.get("keep_best", "")),
        parts=parts_of(reader),
        least_bubble=float(state["bubble"]) if state.get("bubble") else None,
        trains=trains(state),
        found=int(state.get("found") or 0),
        deaths=sum(member.change == "lost" for member in reader.rows(MemberRow)),
        given_back=reader.lease_sums()[2],
        copying=reader.copying() if int(state.get("copies") or 1) > 1 else None,
        copied_bytes=int(state.get("copied") or 0),
    )


def _best(reader: Reader, name: str) -> dict[str, float]:
    """Of the weights that are kept: those of a machine that was lost are not."""
    found: float | None = None
    since = max((event.time_s for event in reader.rows(EventRow) if event.kind == "best"), default=0.0)
    for metric in reader.rows(MetricRow) if name else []:
        if metric.name == name and metric.time_s >= since and better(name, metric.value, found):
            found = metric.value
    return {} if found is None else {name: found}
