"""Replicas that train alone and average their weights, wholly or elastically."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from squall.protocol.exchanges import Cadence, Exchanges, Rules
from squall.strategies.base import Distributed, default_optimizer
from squall.strategies.work import Local, Loop, Update
from squall.task import OptimizerFactory

default_explorer: OptimizerFactory = partial(torch.optim.AdamW, lr=2e-3)  # the centre follows at a distance


@dataclass(frozen=True, kw_only=True)
class Averaging(Distributed):
    """Replicas train alone; every `every` batches their weights become the mean of all (local SGD).

    The mean is weighed by the examples behind it. It takes 1 / `every` of the traffic of `Synchronous`.

    Args:
        replicas: processes that train.
        shards: server processes that own the averaged parameters.
        optimizer: factory of any `torch.optim` optimizer, run on each replica; its state stays there.
        every: batches between averages.

    Example:
        >>> import squall
        >>> squall.Averaging(replicas=4, every=16).recipe().work.local.pushes
        'weights'

    Source: McDonald, Hall, Mann, "Distributed Training Strategies for the Structured Perceptron", NAACL 2010; Stich,
    "Local SGD Converges Fast and Communicates Little", ICLR 2019.

    Not to be used with few, long steps on machines that are unequal: every average waits for the slowest replica.
    """

    optimizer: OptimizerFactory = default_optimizer
    every: int = 8

    def work(self) -> Loop:
        return Loop(
            update=Update(optimizer=partial(torch.optim.SGD, lr=1.0)),
            exchanges=Exchanges(Cadence(self.every, self.every, local=True), Rules("mean")),
            local=Local(optimizer=self.optimizer, pushes="weights"),
        )


@dataclass(frozen=True, kw_only=True)
class ElasticAveraging(Distributed):
    """Replicas train alone, tied to a common centre by a spring (EASGD; with momentum on the replicas, EAMSGD).

    Every `every` batches a replica and the centre move towards each other by a = moving_rate / replicas of their
    difference: x_i <- x_i - a (x_i - c), c <- c + a (x_i - c). The centre is what is evaluated and returned.

    Args:
        replicas: processes that train and explore.
        shards: server processes that own the centre.
        optimizer: factory of any `torch.optim` optimizer, run on each replica; SGD with momentum makes it EAMSGD.
        every: batches between exchanges (the paper's communication period).
        moving_rate: the paper's beta; below 1, or it may oscillate.

    Example:
        >>> import squall
        >>> squall.ElasticAveraging(replicas=4, moving_rate=0.8).recipe().loop.update.optimizer.keywords
        {'lr': 0.2}

    Source: Zhang, Choromanska, LeCun, "Deep Learning with Elastic Averaging SGD", NIPS 2015.

    Not to be used when a run is too short for the centre to follow: it lags behind the replicas.
    """

    optimizer: OptimizerFactory = default_explorer
    every: int = 10
    moving_rate: float = 0.9

    def work(self) -> Loop:
        rate = self.moving_rate / max(1, self.replicas)
        if not 0 < rate < 1:
            raise ValueError(f"moving_rate is {self.moving_rate}: it must be above 0 and below the number of replicas")
        # A fetch brings the centre as this push has moved it, by `rate`: what is left of their distance is 1 - rate of
        # it, and the replica's own move has to be `rate` of the whole.
        return Loop(
            update=Update(optimizer=partial(torch.optim.SGD, lr=rate)),
            exchanges=Exchanges(Cadence(self.every, self.every, local=True)),
            local=Local(optimizer=self.optimizer, pushes="weights", pull=rate / (1 - rate)),
        )
