"""How every benchmark reports: rows with a figure, what it is compared with, and the bound that the project set."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.peers import PeerUnavailable

FILE = Path(__file__).with_name("RESULTS.md")


@dataclass(frozen=True)
class Row:
    """One comparison. `holds` is None where the project promises nothing."""

    what: str
    figure: str
    against: str
    ratio: str
    bound: str
    holds: bool | None = None


@dataclass
class Section:
    """One benchmark's part of RESULTS.md."""

    title: str
    note: str
    rows: list[Row] = field(default_factory=list)

    def at_most(self, what: str, figure: str, against: str, ratio: float, bound: float) -> None:
        self.rows.append(Row(what, figure, against, f"{ratio:.2f} x", f"<= {bound:g} x", ratio <= bound))

    def at_least(self, what: str, figure: str, against: str, ratio: float, bound: float) -> None:
        self.rows.append(Row(what, figure, against, f"{ratio:.2f} x", f">= {bound:g} x", ratio >= bound))

    def below(self, what: str, figure: str, value: float, bound: float, unit: str) -> None:
        self.rows.append(Row(what, figure, "", "", f"<= {bound:g} {unit}", value <= bound))

    def rate(self, what: str, value: float, bound: float, unit: str) -> None:
        self.rows.append(Row(what, f"{value:,.0f} {unit}", "", "", f">= {bound:,.0f} {unit}", value >= bound))

    def within(self, what: str, figure: str, against: str, ratio: float, part: float) -> None:
        self.rows.append(Row(what, figure, against, f"{ratio:.2f} x", f"within {part:.0%}", abs(ratio - 1) <= part))

    def compared(self, what: str, figure: str, against: str, ratio: float) -> None:
        self.rows.append(Row(what, figure, against, f"{ratio:.2f} x", ""))

    def only(self, what: str, figure: str) -> None:
        self.rows.append(Row(what, figure, "", "", ""))

    def markdown(self) -> str:
        mark = {True: "yes", False: "**no**", None: ""}
        measured = f"Commit {commit()}, {datetime.date.today().isoformat()}, {machine()}."
        lines = [
            f"## {self.title}",
            "",
            self.note,
            "",
            measured,
            "",
            "| what | figure | against | ratio | bound | holds |",
        ]
        lines.append("|---|---|---|---|---|---|")
        lines += [
            f"| {r.what} | {r.figure} | {r.against} | {r.ratio} | {r.bound} | {mark[r.holds]} |" for r in self.rows
        ]
        return "\n".join([*lines, ""])


def rounds(measures: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measure everything in turn, several times over, so that a noisy minute does not fall on one of them alone."""
    results: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(repeats):
        for name, measure in measures.items():
            try:
                results[name].append(measure())
            except PeerUnavailable as error:
                print(f"  {name}: not measured ({error})", flush=True)
                continue
            print(f"  {name}: {results[name][-1]:.6g}", flush=True)
    return {name: values for name, values in results.items() if values}


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over the rounds of the ratio inside each round: what both share of a round's noise cancels."""
    return statistics.median(a / b for a, b in zip(ours, theirs))


def write(section: Section) -> None:
    """Put a section into RESULTS.md, in place of the one with its title; the others stay as they were measured."""
    _, *others = FILE.read_text().split("\n## ") if FILE.exists() else [""]
    kept = {text.partition("\n")[0]: f"## {text.strip()}\n" for text in others}
    kept[section.title] = section.markdown()
    FILE.write_text("\n".join([_heading(), *kept.values()]))


def machine() -> str:
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ":unknown")
    python, name = platform.python_version(), cpu.partition(":")[2].strip()
    return f"{name}, {os.cpu_count()} cores, torch {torch.__version__}, Python {python}"


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _heading() -> str:
    return "\n".join(
        [
            "# Results",
            "",
            "Written by `make bench`. Ratios are medians over rounds in which both sides were measured one after the",
            "other; absolute figures are medians and depend on the machine.",
            "",
        ]
    )
