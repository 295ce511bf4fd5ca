"""Asynchronous SGD with a bound on staleness, or with something done about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from squall.checks import require, require_one_of
from squall.protocol.exchanges import Cadence, Exchanges, Rules
from squall.strategies.base import Distributed, default_optimizer, plain_sgd
from squall.strategies.work import Loop, Update
from squall.task import OptimizerFactory


@dataclass(frozen=True, kw_only=True)
class BoundedDelay(Distributed):
    """Each push is an update at once, but no replica may be more than `max_delay` exchanges ahead of the slowest.

    0 is lock-step: all replicas compute on the same weights, and their pushes are applied one after the other. With
    `exchange_every` above 1 replicas move their own weights by SGD in between: stale synchronous parallel (SSP).

    Args:
        replicas: processes that compute gradients.
        shards: server processes that own the parameters.
        optimizer: factory of any elementwise `torch.optim` optimizer, run on the shards.
        max_delay: exchanges that a replica may be ahead of the slowest (tau).
        exchange_every: batches between exchanges.
        overlap: compute the next gradient while the last one is exchanged, at one update more of staleness.

    Example:
        >>> import squall
        >>> squall.BoundedDelay(replicas=4, max_delay=8).recipe().loop.exchanges.rules.max_delay
        8

    Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013;
    Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, section 3.4.

    Not to be used when one replica may be far slower for long: after `max_delay` exchanges all wait for it
    (`Downpour` does not).
    """

    optimizer: OptimizerFactory = default_optimizer
    max_delay: int = 4
    exchange_every: int = 1
    overlap: bool = False

    def work(self) -> Loop:
        cadence = Cadence(self.exchange_every, self.exchange_every, self.overlap)
        exchanges = Exchanges(cadence, Rules(max_delay=self.max_delay))
        return Loop(update=Update(optimizer=self.optimizer), exchanges=exchanges)


@dataclass(frozen=True, kw_only=True)
class AsynchronousSGD(Distributed):
    """Each push is an update at once, and its staleness is made up for.

    "scale" divides the learning rate of an update by its staleness; "compensate" corrects the gradient by a first-order
    estimate of how the weights' movement since the fetch has changed it: g + lambda * g^2 * (w - w_then).

    Args:
        replicas: processes that compute gradients.
        shards: server processes that own the parameters.
        optimizer: factory of any elementwise `torch.optim` optimizer, run on the shards; both are derived for SGD.
        staleness: "scale", "compensate", or "ignore".
        compensation: lambda of "compensate".
        adaptive: decay of a running mean of g^2 by whose root lambda is divided; None keeps lambda constant. The
            paper's adaptive form has lambda 2 and decay 0.95, its constant one lambda 0.04.
        max_delay: exchanges that a replica may be ahead of the slowest; None for no bound.

    Example:
        >>> import squall
        >>> squall.AsynchronousSGD(replicas=8, staleness="scale").recipe().loop.exchanges.rules.scaled
        True

    Source: Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning", arXiv 1511.05950; Zheng et al.,
    "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017.

    Not to be used with an optimizer that rescales gradients itself (Adam, Adagrad) and "compensate": the correction is
    derived for SGD.
    """

    optimizer: OptimizerFactory = plain_sgd
    staleness: Literal["scale", "compensate", "ignore"] = "scale"
    compensation: float = 0.04
    adaptive: float | None = None
    max_delay: int | None = None

    def work(self) -> Loop:
        if self.adaptive is not None and self.staleness != "compensate":
            raise ValueError(f"adaptive is for staleness='compensate', and staleness is {self.staleness!r}")
        require_one_of("staleness", self.staleness, ("ignore", "scale", "compensate"))
        require("compensation", self.compensation, self.compensation >= 0, "0 or more")
        corrected = self.compensation if self.staleness == "compensate" else None
        return Loop(
            update=Update(optimizer=self.optimizer, compensation=corrected, adaptive=self.adaptive),
            exchanges=Exchanges(rules=Rules(max_delay=self.max_delay, scaled=self.staleness == "scale")),
        )
