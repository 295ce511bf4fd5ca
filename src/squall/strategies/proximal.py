"""Delayed block proximal gradient: penalties that give exact zeros, one block of coordinates at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from squall.checks import require
from squall.optim import Proximal
from squall.protocol.exchanges import Exchanges, Rules
from squall.strategies.base import Distributed, plain_sgd
from squall.strategies.work import Loop, Update
from squall.task import OptimizerFactory


@dataclass(frozen=True, kw_only=True)
class DelayedProximal(Distributed):
    """Each push updates one block of the coordinates: w_b <- prox(w_b - lr * g_b), within a bounded delay.

    The t-th exchange of a replica is for block b(t) of `blocks`; the others stay as they are.

    Args:
        replicas: processes that compute gradients.
        shards: server processes that own the parameters.
        optimizer: factory of the optimizer whose step precedes the operator, as SGD; without weight decay of its own.
        l1: strength of l1 * |w|, which makes elements zero.
        l2: strength of l2 / 2 * |w|^2; with l1 the elastic net.
        group: strength of group * (2-norm of each run of `group_size` elements), which makes whole runs zero.
        group_size: elements in a run; a matrix's rows, if it is a param group of its own.
        blocks: equal parts of the vector that take turns.
        order: "cyclic", or "random": another order of all blocks in every sweep.
        max_delay: exchanges that a replica may be ahead of the slowest (tau).
        smoothness: an upper bound L of the loss's curvature; the learning rate is then 1 / ((1 + tau) L). None: the
            optimizer's own.

    Example:
        >>> import squall
        >>> squall.DelayedProximal(l1=1e-3, max_delay=3, smoothness=2.0).recipe().work.blocks
        1

    Source: Li, Andersen, Smola, Yu, "Communication Efficient Distributed Machine Learning with the Parameter Server",
    NIPS 2014, algorithm 2 and theorem 2 (step size).

    Not to be used for networks that need no sparsity: `BoundedDelay` with weight decay is faster.
    """

    optimizer: OptimizerFactory = plain_sgd
    l1: float = 0.0
    l2: float = 0.0
    group: float = 0.0
    group_size: int = 1
    blocks: int = 1
    order: Literal["cyclic", "random"] = "cyclic"
    max_delay: int = 4
    smoothness: float | None = None

    def work(self) -> Loop:
        for name in ("l1", "l2", "group"):
            require(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        require("max_delay", self.max_delay, self.max_delay >= 0, "0 or more, or None for no bound")
        require("group_size", self.group_size, self.group_size >= 1, "at least 1")
        if self.group and (self.shards > 1 or self.blocks > 1):
            raise ValueError("group penalties need whole runs: use shards=1 and blocks=1")
        if not callable(self.optimizer):
            raise ValueError("optimizer must be a factory, for example partial(torch.optim.SGD, lr=0.1)")
        inner = self.optimizer
        if self.smoothness is not None:
            require("smoothness", self.smoothness, self.smoothness > 0, "above 0, or None for the optimizer's own lr")
            inner = partial(inner, lr=1 / ((1 + self.max_delay) * self.smoothness))
        proximal = partial(Proximal, inner=inner, l1=self.l1, l2=self.l2, group=self.group, group_size=self.group_size)
        update = Update(
            optimizer=proximal, elementwise=not self.group, blocks=self.blocks, block_order=self.order
        )  # fmt: skip
        return Loop(update=update, exchanges=Exchanges(rules=Rules(max_delay=self.max_delay)))
