"""Whether a quantized model may take the place of the one in float32: by the task's metrics and by measured times."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.table import Table

from squall.report.words import number, plain, size

TOLERANCE = 0.005  # half a point
NOISE = 0.05  # of a latency: medians of the same file differ by that on a machine with other work


@dataclass(frozen=True)
class Measured:
    """One file, as it was run on this machine."""

    name: str
    metrics: dict[str, float]  # over the validation set
    latency_s: dict[int, float]  # examples in a batch -> median of the time that it takes on one thread
    bytes: int
    in_float: tuple[str, ...] = ()  # layers that quantization would spoil

    @property
    def throughput(self) -> dict[int, float]:
        """Examples in a batch -> examples per second."""
        return {examples: examples / seconds for examples, seconds in self.latency_s.items()}


@dataclass(frozen=True)
class Verdict:
    """What was tried, and which is written: none where `accepted` is None."""

    before: Measured
    tried: list[Measured]
    refused: dict[str, str]  # name -> why
    tolerance: float
    accepted: str | None
    failed: dict[str, str] = field(default_factory=dict)  # ways that do not go with this model, and why

    def __str__(self) -> str:
        metrics, batches = list(self.before.metrics), list(self.before.latency_s)
        columns = [*(f"ms at {b}" for b in batches), *(f"examples/s at {b}" for b in batches)]
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("")
        for name in (*metrics, *columns, "size"):
            table.add_column(name, justify="right")
        for each in (self.before, *self.tried):
            times = [f"{1000 * each.latency_s[b]:.3g}" for b in batches]
            rates = [number(float(f"{each.throughput[b]:.3g}")) for b in batches]
            table.add_row(each.name, *(f"{each.metrics[m]:.4f}" for m in metrics), *times, *rates, size(each.bytes))
        return plain(table, *self._sentences(), width=110)

    def _sentences(self) -> list[str]:
        lines = [f"{name} is refused: {why}" for name, why in self.refused.items()]
        lines += [f"{name} does not go: {why}" for name, why in self.failed.items()]
        lines += [f"{each.name} leaves in float: {', '.join(each.in_float)}" for each in self.tried if each.in_float]
        if self.accepted is None:
            return [*lines, "INT8 is refused: the model is better off in float32 here"]
        chosen = next(each for each in self.tried if each.name == self.accepted)
        gains = ", ".join(f"{ratio:.2f} x at {batch}" for batch, ratio in _gains(self.before, chosen).items())
        return [*lines, f"{self.accepted} is written: {gains}"]


def decide(before: Measured, tried: list[Measured], tolerance: float, failed: dict[str, str] | None = None) -> Verdict:
    """Of those that nothing is held against, accept the one that is fastest on the (geometric) mean of the batches."""
    judged = {each.name: spoiled(before.metrics, each.metrics, tolerance) or slow(before, each) for each in tried}
    good = [each for each in tried if not judged[each.name]]
    best = max(good, key=lambda each: math.prod(_gains(before, each).values()), default=None)
    refused = {name: why for name, why in judged.items() if why}
    return Verdict(before, tried, refused, tolerance, best.name if best else None, failed or {})


def spoiled(before: dict[str, float], after: dict[str, float], tolerance: float) -> str:
    """Which metric has changed by more than the tolerance, or "".

    A loss may grow by this part of itself. Any other metric may change by so much either way, for nothing tells an
    accuracy from an error rate: by 0.005 where it lies between 0 and 1, beyond that by this part of itself.
    """
    for name, was in before.items():
        now = after[name]
        change = now - was if name == "loss" else abs(now - was)
        allowed = tolerance * (abs(was) if name == "loss" else max(1.0, abs(was)))
        if not change <= allowed:  # NaN as well
            return f"{name} goes from {was:.4f} to {now:.4f}, and may change by {allowed:.2g}"
    return ""


def slow(before: Measured, after: Measured) -> str:
    """At which batch it is slower, or that it is nowhere faster, or ""."""
    gains = _gains(before, after)
    lost = [f"{ratio:.2f} x as fast at batch {batch}" for batch, ratio in gains.items() if ratio < 1 / (1 + NOISE)]
    if lost:
        return f"it is {' and '.join(lost)}"
    return "" if max(gains.values()) > 1 + NOISE else "it is nowhere faster"


def _gains(before: Measured, after: Measured) -> dict[int, float]:
    return {batch: before.latency_s[batch] / after.latency_s[batch] for batch in before.latency_s}
