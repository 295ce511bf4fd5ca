"""Sandblaster L-BFGS: all replicas compute the gradient of one large batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from squall.checks import require
from squall.protocol.sandblaster.line_search import SEARCHES
from squall.protocol.sandblaster.method import MethodSettings
from squall.strategies.base import Distributed
from squall.strategies.work import BatchMethod


@dataclass(frozen=True, kw_only=True)
class Sandblaster(Distributed):
    """L-BFGS on batches of any size, whose vectors lie on the shards and whose gradients all replicas compute.

    w <- w + step x direction, direction = -H x gradient, with H from the last `history` pairs of steps and gradient
    changes, and a step from a line search. A batch is cut into portions; a replica asks for the next as it finishes,
    so a fast one does more. The coordinator sees dot products and losses, never a parameter. `steps` of a run counts
    iterations; without a limit "full" batches go on until a tolerance is reached, others for one epoch.

    With batches that are not the whole training set, both gradients of a pair are of the same batch (Berahas, Nocedal
    and Takac 2016), and curvature is damped where it comes out too small (Powell 1978).

    Args:
        replicas: processes that compute gradients.
        shards: server processes that own the vectors.
        history: pairs kept (m): each costs two vectors of memory on the shards.
        portions: parts that a batch is cut into, many more than replicas; None for parts of `Task.batch_size` examples,
            or of fewer where not every replica would get one.
        line_search: "strong_wolfe", or "armijo" (looks at losses alone; curvature is then damped).
        batch: examples of an iteration (all, where there are fewer), which networks learn from in few epochs; "full"
            for the whole training set, the same in every iteration, to the last digit of a convex loss.
        tolerance_gradient: end when no component of the gradient is larger.
        tolerance_change: end when the loss falls by less than this part of itself in an iteration ("full" alone).
        push_every: portions that a replica sums before it pushes.
        backup: idle replicas also compute portions that another one is late with; whoever answers first counts.

    Example:
        >>> import squall
        >>> squall.Sandblaster(replicas=4, history=5).recipe().work.rules.history
        5

    Source: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.2; Chen, Wang, Zhou,
    "Large-scale L-BFGS using MapReduce", NIPS 2014.

    Not to be used where noise helps, as with most deep networks from scratch: gradients of small batches are there
    the better use of the same examples; nor for losses with kinks, where slopes tell little of the way ahead.
    """

    history: int = 10
    portions: int | None = None
    line_search: Literal["strong_wolfe", "armijo"] = "strong_wolfe"
    batch: int | Literal["full"] = 256
    tolerance_gradient: float = 1e-5
    tolerance_change: float = 1e-9
    push_every: int = 4
    backup: bool = True

    def work(self) -> BatchMethod:
        self._check()
        rules = MethodSettings(
            self.history, self.line_search, self.tolerance_gradient, self.tolerance_change, self.batch != "full"
        )
        return BatchMethod(
            rules=rules, examples=None if self.batch == "full" else self.batch, portions=self.portions,
            push_every=self.push_every, backup=self.backup,
        )  # fmt: skip

    def _check(self) -> None:
        require("history", self.history, self.history >= 1, "at least 1 pair")
        if self.portions is not None and self.portions < self.replicas:
            raise ValueError(
                f"portions is {self.portions} for {self.replicas} replicas: cut a batch into several for each, or"
                " leave portions out"
            )
        if self.line_search not in SEARCHES:
            raise ValueError(f"line_search is {self.line_search!r}: use one of {', '.join(SEARCHES)}")
        known = self.batch == "full" if isinstance(self.batch, str) else self.batch >= 1
        require("batch", self.batch, known, "a number of examples, or 'full'")
        require("push_every", self.push_every, self.push_every >= 1, "at least 1 portion")
        for name in ("tolerance_gradient", "tolerance_change"):
            require(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
