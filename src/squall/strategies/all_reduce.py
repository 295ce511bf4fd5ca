"""Lock-step SGD without servers: replicas average their gradients among themselves."""

from __future__ import annotations

from dataclasses import dataclass

from squall.strategies.base import Recipe, Strategy, default_optimizer
from squall.strategies.work import Collective
from squall.task import OptimizerFactory


@dataclass(frozen=True, kw_only=True)
class AllReduce(Strategy):
    """Every update is the mean gradient of one batch from each replica, and every replica makes it itself.

    The same updates as `Synchronous`: w <- w - lr * (1/N) sum_i g_i(w). The sum is formed by torch's
    DistributedDataParallel while gradients are computed (on GPUs over NCCL or Gloo). A script's loop computes them
    itself, so there it is formed behind the loop's step. Where replicas have several parts, each part sums what is its
    own with the same part of the others, and steps on it. A replica that dies costs the others less than a second: they
    form a group without it and go on from the newest step that one of them has made; a replacement gets its weights
    from them.

    Args:
        replicas: processes that compute gradients, each with the whole model and its optimizer.
        optimizer: factory of any `torch.optim` optimizer, also of those that look at whole tensors.
        shard_optimizer: each replica has the optimizer's state of a share of the parameters, and of its neighbour's
            share, and gets the other weights from those who step on them. So the state takes 2/replicas of its memory
            in each, and a replica's death loses none of it. Two neighbours that die at once take a share with them:
            the run ends, and `squall resume` goes on from a snapshot; on several machines it does so by itself, and
            neighbours are on different ones: a machine with up to half of the replicas takes no share with it.

    Example:
        >>> from functools import partial
        >>> import squall, torch
        >>> squall.AllReduce(replicas=4, optimizer=partial(torch.optim.SGD, lr=0.1)).recipe().shards
        0

    Source: Patarasuk and Yuan 2009 (the ring); Li et al., "PyTorch Distributed", VLDB 2020.

    Not to be used when machines are unequal: every step waits for the slowest (`Downpour` does not). When all replicas
    die at once their weights are lost, and the run goes on from a snapshot (`squall resume`; on several machines by
    itself); shards would have kept them.
    """

    replicas: int = 2
    optimizer: OptimizerFactory = default_optimizer
    shard_optimizer: bool = False

    def recipe(self) -> Recipe:
        if self.shard_optimizer and self.replicas == 1:
            raise ValueError("shard_optimizer with one replica: there is nobody to share with, leave it out")
        work = Collective(optimizer=self.optimizer, shard_optimizer=self.shard_optimizer)
        return Recipe(replicas=self.replicas, shards=0, work=work)
