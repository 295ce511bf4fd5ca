"""Examples to 97 % on the digits example, 4 replicas, every strategy with the settings that the example has for it.

In virtual time (the inline launcher, real gradients), so that the machine's cores do not decide how stale they are.
"""

from __future__ import annotations

import dataclasses
import runpy
import statistics
import tempfile
from pathlib import Path
from typing import Any

import squall
from benchmarks.results import Section
from squall.report.comparison import ComparedRun

digits: Any = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "digits.py"))
TARGET = ("accuracy", 0.97)
SEEDS = (0, 1, 2)
EPOCHS = 100
BOUND = 3.0
SETTINGS = squall.Settings(launcher="inline", threads=1, snapshot_every_s=None, progress=False)


def measure() -> Section:
    print("family", flush=True)
    section = Section(
        "The family on the digits",
        "Examples until the digits example first shows 97 %, 4 replicas, median of 3 seeds. The ratio is that of the"
        " worst seed to single-process training with the same seed.",
    )
    single = [examples(squall.SingleProcess(optimizer=digits["SGD"]), seed) for seed in SEEDS]
    section.only("SingleProcess", f"{statistics.median(single):,.0f}")
    for strategy in digits["strategies"]:
        four: Any = dataclasses.replace(strategy, replicas=4)
        found = [examples(four, seed) for seed in SEEDS]
        worst = max(a / b for a, b in zip(found, single))
        print(f"  {strategy}: {found}", flush=True)
        ours, one = f"{statistics.median(found):,.0f}", f"single {statistics.median(single):,.0f}"
        section.at_most(label(strategy), ours, one, worst, BOUND)
    return section


def label(strategy: Any) -> str:
    """The class, and what is not its default."""
    hidden = ("optimizer", "replicas", "shards")
    fields = [field for field in dataclasses.fields(strategy) if field.name not in hidden]
    chosen = [f"{f.name}={getattr(strategy, f.name)}" for f in fields if getattr(strategy, f.name) != f.default]
    return f"{type(strategy).__name__}({', '.join(chosen)})"


def examples(strategy: squall.Strategy, seed: int) -> float:
    """Infinity where the target was not reached."""
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder:
        run = squall.fit(
            digits["task"], strategy, epochs=EPOCHS, until=f"{TARGET[0]}={TARGET[1]}", seed=seed,
            run_dir=Path(folder) / "run", settings=SETTINGS,
        )  # fmt: skip
        first = ComparedRun("", seed, run.directory).first(TARGET)
    return first.examples if first is not None else float("inf")
