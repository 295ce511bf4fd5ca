"""DiLoCo: many local steps, and an outer optimizer on what they add up to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from squall.checks import require
from squall.optim import DelayedNesterov
from squall.protocol.exchanges import Cadence, Dealing, Exchanges, Rules
from squall.strategies.base import Distributed, default_optimizer
from squall.strategies.work import Local, Loop, Update
from squall.task import OptimizerFactory


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Distributed):
    """Replicas take `inner_steps` steps of their own; Nesterov momentum on the shards follows their mean movement.

    A replica pushes the outer gradient: the weights it fetched minus the weights it reached. In the "asynchronous" form
    each push is an update, and the momentum is refreshed only every `momentum_every` pushes (delayed Nesterov), because
    pushes that overlap in time would count the same direction several times. In the "decoupled" form an update takes
    the first `quorum` pushes and those that come within the grace; what comes later counts in the next.

    A round that is cut short, as the last one may be, is a correspondingly smaller outer step: momentum would move the
    weights as far for a few batches as for hundreds.

    Args:
        replicas: processes that train.
        shards: server processes that own the global weights and run the outer optimizer.
        optimizer: factory of the inner optimizer, any of `torch.optim`, run on each replica; its state stays there.
        inner_steps: batches between exchanges (H).
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: its Nesterov momentum.
        form: "synchronous", "asynchronous" or "decoupled" (with one shard).
        matched: asynchronous: slower replicas take fewer inner steps, in proportion to their speed, so that all push
            about as often and no push is very stale.
        momentum_every: asynchronous: pushes between refreshes of the momentum; None for the number of replicas.
        quorum: decoupled: pushes that an update waits for; None for more than half of the replicas.
        grace: decoupled: how long an update waits beyond the quorum, as a share of the last one's duration.

    Example:
        >>> import squall
        >>> squall.DiLoCo(replicas=8, inner_steps=100).recipe().work.local.pushes
        'delta'

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105;
    Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135; decoupled: arXiv 2604.21428.

    Not to be used on machines with a fast network between them: `Synchronous` needs fewer examples to the same loss.
    """

    optimizer: OptimizerFactory = default_optimizer
    inner_steps: int = 500
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    form: Literal["synchronous", "asynchronous", "decoupled"] = "synchronous"
    matched: bool = False
    momentum_every: int | None = None
    quorum: int | None = None
    grace: float = 0.1

    def work(self) -> Loop:
        self._check()
        outer: OptimizerFactory = partial(
            torch.optim.SGD, lr=self.outer_lr, momentum=self.outer_momentum, nesterov=self.outer_momentum > 0
        )
        if self.form == "asynchronous":
            every = self.replicas if self.momentum_every is None else self.momentum_every
            outer = partial(DelayedNesterov, lr=self.outer_lr, momentum=self.outer_momentum, every=every)
        decoupled = self.form == "decoupled"
        quorum = self.replicas // 2 + 1 if self.quorum is None else self.quorum
        rules = Rules(
            "each" if self.form == "asynchronous" else "mean", quorum=quorum if decoupled else None,
            grace=self.grace if decoupled else 0.0, late="fold" if decoupled else "drop",
            whole=self.inner_steps if self.outer_momentum > 0 else 0,
        )  # fmt: skip
        cadence = Cadence(self.inner_steps, self.inner_steps, local=True)
        return Loop(
            update=Update(optimizer=outer), exchanges=Exchanges(cadence, rules, Dealing(matched=self.matched)),
            local=Local(optimizer=self.optimizer, pushes="delta"),
        )  # fmt: skip

    def _check(self) -> None:
        if self.form not in ("synchronous", "asynchronous", "decoupled"):
            raise ValueError(f"form is {self.form!r}: use synchronous, asynchronous or decoupled")
        require("inner_steps", self.inner_steps, self.inner_steps >= 1, "at least 1")
        require("outer_lr", self.outer_lr, self.outer_lr > 0, "above 0")
        require("outer_momentum", self.outer_momentum, 0 <= self.outer_momentum < 1, "0 or more and below 1")
        if self.momentum_every is not None and (self.momentum_every < 1 or self.form != "asynchronous"):
            raise ValueError(f"momentum_every is {self.momentum_every}: at least 1, and with form='asynchronous' alone")
        if self.matched and self.form != "asynchronous":
            raise ValueError(f"matched is of form='asynchronous', where nobody waits, and form is {self.form!r}")
        if self.quorum is not None and self.form != "decoupled":
            raise ValueError(f"quorum is {self.quorum}: it is of form='decoupled', and form is {self.form!r}")
