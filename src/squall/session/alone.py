"""A script that trains in one process: what stands behind its session when nobody has launched it."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch

from squall.protocol.effects import Compute
from squall.protocol.messages import Factors
from squall.runtime.backward import Backward
from squall.runtime.job import initial_vector
from squall.runtime.optimizers import bare_step, build_optimizer, rates_scaled
from squall.session.backend import SessionBackend
from squall.task import Batch, OptimizerFactory, Task
from squall.vector import Layout


class AloneBackend(SessionBackend):
    """The script in one process, trained by the optimizer that it names: what `python train.py` does."""

    rank = 0
    replicas = 1

    def __init__(self, optimizer: OptimizerFactory) -> None:
        self._factory = optimizer

    def begin(self, task: Task, epochs: int) -> None:
        layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
        weights = initial_vector(layout, task).clone()  # of this process alone, also where the script forks others
        self._backward = Backward(task, layout, [weights], 0, torch.device("cpu"))
        self._backward.on_vector.use(0)
        self._optimizer = build_optimizer(self._factory, task.param_groups())
        self._scheduler = task.schedule(self._optimizer) if task.schedule is not None else None
        self._step = bare_step(self._optimizer, tracked=True)
        self._work = (
            Compute(epoch, start, min(start + task.batch_size, task.examples), 0, False, False)
            for epoch in range(epochs)
            for start in range(0, task.examples, task.batch_size)
        )

    def next(self) -> Compute | None:
        return next(self._work, None)

    def load(self, effect: Compute) -> Batch:
        return self._backward.load(effect)

    def accept(
        self, effect: Compute, loss: float | None, started: float, factors: Factors = (), over: bool = True
    ) -> bool:  # fmt: skip
        self._backward.finish()
        with rates_scaled(self._optimizer, 1.0, factors):
            self._step()
        if self._scheduler is not None:
            self._scheduler.step()
        return True

    def log(self, values: Mapping[str, float]) -> None:
        sys.stdout.write("  ".join(f"{name} {value:.4g}" for name, value in values.items()) + "\n")

    def leave(self) -> None:
        self.status = "finished"
        self._backward.batches.close()
