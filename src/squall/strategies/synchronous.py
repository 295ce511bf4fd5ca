"""Lock-step SGD: what one process would do with the union of the batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from squall.protocol.exchanges import Exchanges, Rules
from squall.strategies.base import Distributed, default_optimizer
from squall.strategies.work import Loop, Update
from squall.task import OptimizerFactory


@dataclass(frozen=True, kw_only=True)
class Synchronous(Distributed):
    """Every update is the mean gradient of one batch from each replica; all replicas have the same weights.

    With B examples a batch and N replicas this is SGD with batches of N x B: w <- w - lr * (1/N) sum_i g_i(w).
    With `backup` replicas an update takes the first N - backup pushes and does not wait for the others.

    Args:
        replicas: processes that compute gradients, the backup ones included.
        shards: server processes that own the parameters.
        optimizer: factory of any elementwise `torch.optim` optimizer, run on the shards.
        backup: replicas whose pushes an update does not wait for (with one shard); 0 makes a run repeatable.
        late: "drop" a push that comes after its update (its examples are trained again), or "fold" it into the next.

    Example:
        >>> from functools import partial
        >>> import squall, torch
        >>> squall.Synchronous(replicas=4, optimizer=partial(torch.optim.SGD, lr=0.1)).recipe().loop.exchanges.in_rounds
        True

    Source: the textbook algorithm; sums are weighed by examples, so that a short last batch counts as it should.
    Backup replicas: Chen et al., "Revisiting Distributed Synchronous SGD", arXiv 1604.00981.

    Not to be used when machines are unequal or die often: every step waits for the slowest (`Downpour` does not).
    """

    optimizer: OptimizerFactory = default_optimizer
    backup: int = 0
    late: Literal["drop", "fold"] = "drop"

    def work(self) -> Loop:
        rules = Rules("mean", max_delay=0, backup=self.backup, late=self.late)
        return Loop(update=Update(optimizer=self.optimizer), exchanges=Exchanges(rules=rules))
