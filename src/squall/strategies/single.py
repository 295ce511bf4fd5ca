"""The baseline: one process."""

from __future__ import annotations

from dataclasses import dataclass

from squall.strategies.base import Recipe, Strategy, default_optimizer
from squall.strategies.work import Loop, Update
from squall.task import OptimizerFactory


@dataclass(frozen=True, kw_only=True)
class SingleProcess(Strategy):
    """Plain sequential training in the calling process; every other strategy is measured against it.

    w <- w - lr * g(w), with the same data order, seeds and optimizer kernels as the other strategies: one replica of
    `Synchronous` or `Downpour` gives the same weights, bit for bit.

    Args:
        optimizer: factory of any elementwise `torch.optim` optimizer.

    Example:
        >>> import squall
        >>> squall.SingleProcess().recipe().replicas
        1

    Source: the textbook algorithm.

    Not to be used when more than one core or machine is there to help.
    """

    optimizer: OptimizerFactory = default_optimizer

    def recipe(self) -> Recipe:
        return Recipe(replicas=1, shards=1, work=Loop(update=Update(optimizer=self.optimizer), alone=True))
