"""Runs side by side: one page, one picture, one table."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.box import SIMPLE_HEAD
from rich.table import Table

from squall.record.rows import MetricRow
from squall.report.figures import Chart, Points, bars_chart, lines_chart
from squall.report.html import gaps, page_of, table_of, write_whole
from squall.report.reader import Reader
from squall.report.summary import Summary, summarize
from squall.report.words import LOSSES, clock, number, plain, plural, size

COLUMNS = (
    "run", "strategy", "optimizer", "status", "replicas x threads", "result", "to the target", "examples to it",
    "examples/s", "staleness", "exchanged",
)  # fmt: skip
WORDS = (*COLUMNS[:4], "result")  # columns that are no numbers
NOTHING = "-"
EMPTY = (NOTHING, "0.00", "0 B")  # a column of these alone says nothing
UNREACHED = "not reached"


@dataclass(frozen=True)
class ComparedRun:
    """A run, and what it is called on the page: by its strategy, or by its directory."""

    name: str
    seed: int
    directory: Path

    @cached_property
    def summary(self) -> Summary:
        with closing(Reader(self.directory / "run.sqlite")) as reader:
            return summarize(reader)

    @cached_property
    def plan(self) -> dict[str, Any]:
        """Empty where it cannot be read."""
        try:
            document = json.loads((self.directory / "run.json").read_text())
        except (OSError, ValueError):
            return {}
        plan = document.get("plan") if isinstance(document, dict) else None
        return plan if isinstance(plan, dict) else {}

    @cached_property
    def gaps(self) -> list[str]:
        """What a finished run would have and this one lacks, in sentences."""
        with closing(Reader(self.directory / "run.sqlite")) as reader:
            return [f"{self.name}: {gap[:1].lower()}{gap[1:]}" for gap in gaps(reader, self.summary)]

    @cached_property
    def metrics(self) -> list[MetricRow]:
        with closing(Reader(self.directory / "run.sqlite")) as reader:
            return list(reader.rows(MetricRow))

    def first(self, target: tuple[str, float]) -> MetricRow | None:
        """The first result that meets a target."""
        name, value = target
        sign = -1 if name in LOSSES else 1
        found = [m for m in self.metrics if m.name == name and sign * m.value >= sign * value]
        return min(found, key=lambda metric: metric.time_s, default=None)


class Comparison:
    """What came out of several runs. Figures of those with one name, a strategy's, are medians over its seeds."""

    def __init__(
        self, page: Path, trials: Sequence[ComparedRun], target: tuple[str, float] | None, cores: int | None
    ) -> None:  # fmt: skip
        """`cores`: what each strategy had; None: these are any runs, each with a name of its own."""
        self.page = page
        self.trials = list(trials)
        self.target = target
        self.cores = cores

    @property
    def picture(self) -> Path:
        return self.page.with_suffix(".png")

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(trial.name for trial in self.trials))

    def of(self, name: str) -> list[ComparedRun]:
        return [trial for trial in self.trials if trial.name == name]

    # ------------------------------------------------------------ numbers

    def to_json_dict(self) -> dict[str, Any]:
        """Strategy -> medians over its seeds, and each run's own summary."""
        return {
            "target": None if self.target is None else f"{self.target[0]}={self.target[1]:g}",
            "page": str(self.page),
            "cores": self.cores,
            "strategies": {name: self._figures(name) for name in self.names},
        }

    def _figures(self, name: str) -> dict[str, Any]:
        trials = self.of(name)
        reached = [trial.first(self.target) if self.target is not None else None for trial in trials]
        everywhere = [metric for metric in reached if metric is not None]
        met = len(everywhere) == len(trials)
        return {
            "optimizer": trials[0].summary.optimizer,
            "replicas": trials[0].plan.get("replicas"),
            "threads": trials[0].plan.get("threads"),
            "metrics": {metric: _median(trials, _metric(metric)) for metric in trials[0].summary.metrics},
            "reached_by": len(everywhere),
            "seconds_to_target": statistics.median(m.time_s for m in everywhere) if met else None,
            "examples_to_target": statistics.median(m.examples for m in everywhere) if met else None,
            "examples_per_second": _median(trials, lambda s: s.examples_per_second),
            "staleness_mean": _median(trials, lambda s: s.staleness_mean),
            "exchanged_bytes": _median(trials, lambda s: s.exchanged_bytes),
            "runs": [{"seed": t.seed, "run_directory": str(t.directory), **t.summary.to_json_dict()} for t in trials],
        }

    def cells(self) -> tuple[list[str], list[tuple[str, ...]]]:
        """The columns of the table in which there is anything, and its lines."""
        rows = self._rows()
        told = [n for n in range(len(COLUMNS)) if any(row[n] not in EMPTY for row in rows)]
        return [COLUMNS[n] for n in told], [tuple(row[n] for n in told) for row in rows]

    def _rows(self) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = []
        for name in self.names:
            figures, first = self._figures(name), self.of(name)[0]
            shown = {m: v for m, v in figures["metrics"].items() if v is not None}
            best = self.target[0] if self.target is not None else next((m for m in shown if m not in LOSSES), "loss")
            seconds, examples = figures["seconds_to_target"], figures["examples_to_target"]
            missing = (
                NOTHING if self.target is None else f"{UNREACHED} ({figures['reached_by']} of {len(self.of(name))})"
            )
            found.append(
                (
                    name if self.cores is None else NOTHING,
                    first.summary.strategy if self.cores is None else name,
                    figures["optimizer"] or NOTHING,
                    NOTHING if first.summary.status == "finished" else first.summary.status,
                    f"{figures['replicas']} x {figures['threads']}" if first.plan else NOTHING,
                    f"{best} {number(shown[best])}" if best in shown else NOTHING,
                    missing if seconds is None else clock(seconds),
                    NOTHING if examples is None else number(examples),
                    number(round(figures["examples_per_second"] or 0)),
                    NOTHING if figures["staleness_mean"] is None else f"{figures['staleness_mean']:.2f}",
                    size(int(figures["exchanged_bytes"] or 0)),
                )
            )
        return found

    def __str__(self) -> str:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        columns, rows = self.cells()
        for column in columns:
            table.add_column(column, justify="left" if column in WORDS else "right", no_wrap=column == "strategy")
        for row in rows:
            table.add_row(*row)
        return f"{plain(table, width=140)}\n{self.same_cores}"

    @property
    def same_cores(self) -> str:
        """What each strategy had to compute with, in a sentence or two."""
        if self.cores is None:
            return ""
        found = f"Each had the same {plural(self.cores, 'core')}, as replicas x threads."
        lone = next((trial for trial in self.trials if trial.plan["strategy"] == "single_process"), None)
        if lone is not None and lone.plan["threads"] < self.cores:
            found += f" {lone.name} has one thread, because with {self.cores} it is not faster on this task."
        return found

    # ------------------------------------------------------------ the page and the picture

    def charts(self) -> list[Chart]:
        metrics = list(dict.fromkeys(m.name for trial in self.trials for m in trial.metrics))
        found = []
        for metric in sorted(metrics, key=lambda name: name in LOSSES):  # losses come last
            over_time = {n: [_points(t, metric, lambda m: m.time_s) for t in self.of(n)] for n in self.names}
            over_examples = {n: [_points(t, metric, lambda m: m.examples) for t in self.of(n)] for n in self.names}
            duration_s = max((t.summary.training_s for t in self.trials), default=0.0)
            found.append(lines_chart(f"{metric} over time", over_time, duration_s))
            found.append(lines_chart(f"{metric} over examples", over_examples, None))
        for title, key in (
            ("seconds to the target", "seconds_to_target"), ("examples per second", "examples_per_second"),
            ("mean staleness", "staleness_mean"), ("bytes exchanged", "exchanged_bytes"),
        ):  # fmt: skip
            bars = {name: self._figures(name)[key] for name in self.names}
            if any(bars.values()) or (key == "seconds_to_target" and self.target is not None):
                found.append(bars_chart(title, bars))
        return found

    def write(self) -> None:
        """The page, and beside it a picture: the first metric over time and over examples."""
        self.write_page()
        self._draw()

    def write_page(self) -> None:
        """The page alone, self-contained."""
        columns, rows = self.cells()
        table = table_of(rows, "wide", columns)
        goal = "" if self.target is None else f"<p>target: {escape(self.target[0])} {self.target[1]:g}</p>"
        seeds = max(len(self.of(name)) for name in self.names)
        many = f" Medians over {seeds} seeds; every run is drawn." if seeds > 1 else ""
        note = f'<p class="faint">{escape(self.same_cores)}{many}</p>'
        title = "comparison" if self.cores is not None else plural(len(self.trials), "run")
        missing = [gap for trial in self.trials for gap in trial.gaps]
        write_whole(self.page, page_of(title, self.charts(), goal + table + note + self._links(), missing))

    def _links(self) -> str:
        """To the runs' own reports, from where the page is."""
        found = []
        for trial in self.trials:
            if (report := trial.directory / "report.html").exists():
                name = trial.name if len(self.of(trial.name)) == 1 else f"{trial.name}, seed {trial.seed}"
                address = quote(os.path.relpath(report, self.page.resolve().parent))
                found.append(f'<a href="{escape(address)}">{escape(name)}</a>')
        return f"<p>reports: {' · '.join(found)}</p>" if found else ""

    def _draw(self) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        names = [m.name for trial in self.trials for m in trial.metrics]
        metric = self.target[0] if self.target is not None else next((n for n in names if n not in LOSSES), "loss")
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        panels = figure.subplots(1, 2)
        for axes, label, place in zip(
            panels, ("seconds of training", "examples trained"), (lambda m: m.time_s, lambda m: m.examples), strict=True
        ):
            for index, name in enumerate(self.names):
                for run, trial in enumerate(self.of(name)):
                    x, y = zip(*(_points(trial, metric, place) or [(math.nan, math.nan)]), strict=True)
                    marker = "o" if len(x) == 1 else None  # else nothing would be seen of it
                    label_once = name if run == 0 else None
                    axes.plot(x, y, color=f"C{index % 10}", linewidth=1.3, marker=marker, label=label_once)
            axes.set_xlabel(label)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel(metric)
        panels[1].legend(frameon=False, fontsize=9)
        FigureCanvasAgg(figure).print_png(self.picture)  # type: ignore[no-untyped-call]


def _points(trial: ComparedRun, metric: str, place: Callable[[MetricRow], float]) -> Points:
    return [(float(place(m)), m.value) for m in trial.metrics if m.name == metric and math.isfinite(m.value)]


def _metric(name: str) -> Callable[[Summary], float | None]:
    return lambda summary: summary.metrics.get(name)


def _median(trials: Sequence[ComparedRun], figure: Callable[[Summary], float | None]) -> float | None:
    values = [value for trial in trials if (value := figure(trial.summary)) is not None and math.isfinite(value)]
    return statistics.median(values) if values else None
