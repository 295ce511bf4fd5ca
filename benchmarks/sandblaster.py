"""Sandblaster: a shard's vector work against the memory traffic that it needs, and a slow replica against none."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import squall
from benchmarks.peers.common import launch
from benchmarks.results import Section, median_ratio, rounds
from benchmarks.workloads import Workload, speech_mlp
from squall.protocol.sandblaster.messages import Calculation, Combine
from squall.record.rows import MetricRow
from squall.report import Reader
from squall.runtime.vectors import VectorStore
from squall.vector import Layout

ELEMENTS = 10_000_000
HISTORY = 10
BASIS = (*(f"{kind}{slot}" for slot in range(HISTORY) for kind in "sy"), "gradient")
CALCULATIONS = (
    Calculation(
        1,
        (
            Combine("s3", (("direction", 0.5),)),
            Combine("y3", (("sum", 1.0), ("gradient", -1.0))),
            Combine("gradient", (("sum", 1.0),)),
            Combine("weights", (("trial", 1.0),)),
        ),
        rows=("y3", "gradient"), columns=BASIS, largest=("gradient",),
    ),
    Calculation(
        2,
        (
            Combine("direction", tuple((name, 0.1) for name in BASIS)),
            Combine("trial", (("weights", 1.0), ("direction", 0.5))),
        ),
        opens=1,
    ),
    Calculation(3, rows=("sum",), columns=("direction",)),
)  # fmt: skip
# Vectors read and written once each: s, y, gradient and weights (5 + 4), the products (21), the direction (21 + 1),
# the trial (2 + 1), the sum set to zero (1), the slope (2). The largest component comes with the products.
TRAFFIC = 4 * ELEMENTS * (5 + 4 + len(BASIS) + len(BASIS) + 1 + 2 + 1 + 1 + 2)
STEPS = 6


def measure(repeats: int = 5) -> Section:
    print("sandblaster", flush=True)
    section = Section(
        "Sandblaster",
        "Vector work: what one shard does in an iteration with one evaluation, against its memory traffic"
        f" ({TRAFFIC / 1e9:.2f} GB) at the speed of a copy. Iterations: real processes, a network 440-512-512-256 on"
        " 4,096 frames in 64 portions; the slow one of 4 replicas takes 10 times as long.",
    )
    found = rounds({"work": lambda: launch(_work, 1)[0], "traffic": lambda: launch(_traffic, 1)[0]}, repeats)
    what = f"vector work, {ELEMENTS:,} elements, history {HISTORY}"
    section.at_most(what, _ms(found["work"]), f"traffic {_ms(found['traffic'])}", _ratio(found, "work", "traffic"), 1.5)
    workload = dataclasses.replace(speech_mlp(), widths=(440, 512, 512, 256))
    found = rounds(
        {
            "3 replicas": lambda: _iteration(workload, 3, slow=None, backup=True),
            "4, one slow": lambda: _iteration(workload, 4, slow=0.1, backup=True),
            "4, one slow, no backup": lambda: _iteration(workload, 4, slow=0.1, backup=False),
        },
        repeats,
    )
    for name in ("4, one slow", "4, one slow, no backup"):
        ratio = _ratio(found, name, "3 replicas")
        against = f"3 replicas {_ms(found['3 replicas'])}"
        if name == "4, one slow":
            section.at_most(f"iteration, {name}", _ms(found[name]), against, ratio, 1.3)
        else:
            section.only(f"iteration, {name}", f"{_ms(found[name])}, {ratio:.2f} x")
    return section


def _work(rank: int, gate: object) -> float:
    """Seconds of the calculations of one iteration."""
    torch.set_num_threads(1)
    layout = Layout((), (), (0,), ELEMENTS, ELEMENTS)
    store = VectorStore(layout, 0, 1, HISTORY, None, torch.randn(ELEMENTS))  # type: ignore[arg-type]  # no replicas
    for calculation in (Combine(name, (("weights", 0.1 * place + 0.1),)) for place, name in enumerate(BASIS)):
        store.calculate(Calculation(0, (calculation,)))
    return _fastest(lambda: [store.calculate(calculation) for calculation in CALCULATIONS])


def _traffic(rank: int, gate: object) -> float:
    """Seconds that as many bytes take in plain copies."""
    torch.set_num_threads(1)
    source, target = torch.randn(ELEMENTS), torch.empty(ELEMENTS)
    return _fastest(lambda: target.copy_(source)) * TRAFFIC / (8 * ELEMENTS)


def _fastest(work: Callable[[], object], times: int = 8) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def _iteration(workload: Workload, replicas: int, slow: float | None, backup: bool) -> float:
    """Seconds of an iteration, from the first one's end to the last one's."""
    strategy = squall.Sandblaster(
        batch="full", replicas=replicas, backup=backup, tolerance_change=0.0, tolerance_gradient=0.0
    )
    settings = squall.Settings(threads=1, slow=slow, snapshot_every_s=None, progress=False)
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder:
        run = squall.fit(
            partial(_task, workload), strategy, steps=STEPS, run_dir=Path(folder) / "run", settings=settings
        )
        reader = Reader(run.directory / "run.sqlite")
        rows = [row for row in reader.rows(MetricRow) if row.name == "objective"]
        reader.close()
        batches = (rows[-1].examples - rows[0].examples) / len(workload.train_inputs)
        return (rows[-1].time_s - rows[0].time_s) / batches


def _task(workload: Workload) -> squall.Task:
    labels = workload.train_labels % workload.widths[-1]
    return squall.Task(
        model=workload.model(),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        train=torch.utils.data.TensorDataset(workload.train_inputs, labels),
        batch_size=workload.batch_size,
    )


def _ratio(found: dict[str, list[float]], ours: str, theirs: str) -> float:
    return median_ratio(found[ours], found[theirs])


def _ms(values: list[float]) -> str:
    return f"{1e3 * statistics.median(values):.0f} ms"


if __name__ == "__main__":
    print(measure().markdown())
