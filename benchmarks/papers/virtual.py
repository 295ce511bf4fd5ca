"""Training many replicas on one core: real gradients, the shipping protocol, a virtual clock."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import squall
from benchmarks.workloads import digits_mlp
from squall.launchers.inline import InlineRun
from squall.plan import check_together, make_plan
from squall.protocol.nodes import Node
from squall.report.comparison import ComparedRun
from squall.report.summary import Summary
from squall.runtime.job import private_job
from squall.runtime.run_plan import Aims
from squall.runtime.seeds import seed_everything

SETTINGS = squall.Settings(launcher="inline", threads=1, snapshot_every_s=None, progress=False)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One run. Times are virtual seconds."""

    curve: list[tuple[float, int, float]]  # time, examples, the task's metric; after every epoch
    summary: Summary
    computed: int  # batches, of all replicas together
    computed_s: float
    diverged: bool  # it ended with a loss that was no number

    def error(self) -> float:
        """Of the test set of digits in the end, in percent; chance, if there is no end."""
        return 90.0 if self.diverged else 100 * (1 - self.curve[-1][2])

    def to(self, target: float) -> tuple[float, int] | None:
        """Time and examples until the accuracy first was `target`."""
        return next(((time_s, examples) for time_s, examples, value in self.curve if value >= target), None)


def digits() -> squall.Task:
    workload = digits_mlp()
    return squall.Task(
        model=workload.model(),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        train=workload.train_set(),
        validate=workload.test_set(),
        batch_size=16,
        metrics={"accuracy": lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).float()},
    )


def train(
    strategy: squall.Strategy, *, task: Callable[[], squall.Task] = digits, epochs: int, seed: int,
    step_s: Callable[[random.Random], float], settings: squall.Settings = SETTINGS,
) -> Outcome:  # fmt: skip
    """Train a task of one metric; a computation takes `step_s(random)` virtual seconds, of a generator of the seed."""
    torch.set_num_threads(1)
    plan = make_plan(strategy, settings, Aims(epochs=epochs), seed=seed)
    seed_everything(seed)
    made = task()
    layout = check_together(plan, strategy, made)
    chance = random.Random(seed)
    steps_s: list[float] = []

    def next_step_s(node: Node) -> float:
        steps_s.append(step_s(chance))
        return steps_s[-1]

    with tempfile.TemporaryDirectory(prefix="squall-papers-") as folder:
        job = private_job(plan, strategy, made, layout, Path(folder))
        end = InlineRun(job, next_step_s).run()
        assert end.status in ("finished", "nonfinite"), end
        trial = ComparedRun("", seed, Path(folder))
        curve = [(m.time_s, m.examples, m.value) for m in trial.metrics if m.name in made.metrics]
        return Outcome(curve, trial.summary, len(steps_s), sum(steps_s), end.status == "nonfinite")
