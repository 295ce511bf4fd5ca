"""Squall's own side of the training benchmarks: the same workloads as the peers', through `squall.fit`.

What the peers do before their clocks start, the task does before replicas are forked from it: warm-up steps whose loss
counts nothing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from setproctitle import getproctitle
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import squall
from benchmarks.peers.common import WARM_UP_STEPS, backward
from benchmarks.workloads import Workload
from squall.record.rows import EventRow, ProgressRow
from squall.report import Reader

STEADY_AFTER_S = 1.0  # the first second of a run is warm-up: pages, caches, thread pools


def downpour(workload: Workload, replicas: int, exchange_every: int = 1, overlap: bool = False) -> squall.Downpour:
    return squall.Downpour(
        replicas=replicas, optimizer=partial(torch.optim.SGD, lr=workload.lr), push_every=exchange_every,
        fetch_every=exchange_every, overlap=overlap,
    )  # fmt: skip


def samples_per_second(
    workload: Workload, strategy: squall.Strategy, seconds: float, threads: int = 1, slow_ratio: float = 0.0
) -> float:
    """All replicas' samples a second once the run is steady; replica 1 sleeps `slow_ratio` x its own computing time."""
    settings = squall.Settings(
        threads=threads, seconds=seconds + STEADY_AFTER_S, snapshot_every_s=None, progress=False
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder:
        task = partial(_task, workload, evaluate=False, slow_ratio=slow_ratio)
        run = squall.fit(task, strategy, run_dir=Path(folder) / "run", settings=settings)
        return steady(run)


def training_task(workload: Workload) -> Callable[[], squall.Task]:
    """A workload to train, and nothing more."""
    return partial(_task, workload, evaluate=False, slow_ratio=0.0)


def steady(run: squall.Run) -> float:
    """Examples reported in (STEADY_AFTER_S, end], by the time between the first and last report, replica by replica."""
    reader = Reader(run.directory / "run.sqlite")
    rate = 0.0
    rows = reader.rows(ProgressRow)
    reader.close()
    for replica in sorted({row.replica for row in rows}):
        reports = [row for row in rows if row.replica == replica and row.time_s >= STEADY_AFTER_S]
        if len(reports) > 1:
            rate += sum(row.examples for row in reports[1:]) / (reports[-1].time_s - reports[0].time_s)
    return rate


def seconds_to_accuracy(workload: Workload, strategy: squall.Strategy, target: float = 0.97) -> float:
    """Training time until an evaluation has shown the target; it goes on beside the training, and is waited for."""
    settings = squall.Settings(threads=1, snapshot_every_s=None, progress=False)
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder:
        task = partial(_task, workload, evaluate=True, slow_ratio=0.0)
        run = squall.fit(
            task,
            strategy,
            epochs=500,
            until=f"accuracy={target}",
            seed=workload.order_seed,
            run_dir=Path(folder) / "run",
            settings=settings,
        )
        reader = Reader(run.directory / "run.sqlite")
        reached = [event.time_s for event in reader.rows(EventRow) if event.kind == "reached"]
        reader.close()
    if not reached:
        raise RuntimeError(f"{strategy} did not reach {target} in 500 epochs")
    return reached[0]


def _task(workload: Workload, evaluate: bool, slow_ratio: float) -> squall.Task:
    model = workload.model()
    for inputs, labels in islice(workload.epoch(0), WARM_UP_STEPS):
        backward(model, inputs, labels, 0.0)
    return squall.Task(
        model=model,
        loss=_Straggler(model, slow_ratio) if slow_ratio else _loss,
        train=workload.train_set(),
        validate=workload.test_set() if evaluate else None,
        batch_size=workload.batch_size,
        metrics={"accuracy": _accuracy} if evaluate else {},
    )


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = cross_entropy(model(batch[0]), batch[1])
    return loss


def _accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    hits: Tensor = model(batch[0]).argmax(1) == batch[1]
    return hits.float()


class _Straggler:
    """The loss; in the process of replica 1 a hook on the last gradient sleeps in proportion to the computing time."""

    def __init__(self, model: nn.Module, ratio: float) -> None:
        self._ratio = ratio
        self._began = 0.0
        first = next(iter(model.parameters()))
        first.register_post_accumulate_grad_hook(self._sleep)  # type: ignore[no-untyped-call,unused-ignore]

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self._began = time.perf_counter()
        return _loss(model, batch)

    def _sleep(self, parameter: Tensor) -> None:
        if getproctitle().startswith("squall replica 1 "):
            time.sleep(self._ratio * (time.perf_counter() - self._began))
