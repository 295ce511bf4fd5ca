"""Optimizers for shards that torch does not have. All are elementwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class DelayedNesterov(Optimizer):
    """Nesterov momentum for pushes that overlap in time: the momentum is refreshed every `every` steps.

    In between, each step applies its gradient / `every`; the mean of the gradients since the last refresh then moves
    the momentum: m <- momentum * m + mean(g); w <- w - lr * (momentum * m + g / every). With `every` 1 it is torch's
    SGD with Nesterov momentum.

    Args:
        params: as of every `torch.optim` optimizer; float32.
        lr: learning rate.
        momentum: of the refreshed buffer, 0 or more and below 1.
        every: steps between refreshes.

    Source: Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135, algorithm 3 (c = 0).
    """

    def __init__(self, params: Any, lr: float = 0.7, momentum: float = 0.9, every: int = 1) -> None:
        if lr < 0 or not 0 <= momentum < 1 or every < 1:
            raise ValueError(f"lr {lr}, momentum {momentum}, every {every}: use lr >= 0, 0 <= momentum < 1, every >= 1")
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return loss

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, momentum, every = self.state[parameter], group["momentum"], group["every"]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["momentum_buffer"] = torch.zeros_like(parameter)
            state["gathered"] = torch.zeros_like(parameter)
        state["step"] += 1
        state["gathered"].add_(gradient, alpha=1 / every)
        parameter.sub_(gradient, alpha=group["lr"] / every)
        if int(state["step"]) % every == 0:
            buffer = state["momentum_buffer"].mul_(momentum).add_(state["gathered"])
            parameter.sub_(buffer, alpha=group["lr"] * momentum)
            state["gathered"].zero_()


class Proximal(Optimizer):
    """A step of another optimizer, and then the proximal operator of a penalty, at the step's learning rate.

    L1: shrink every element by lr * l1, to zero at most. L2: divide by 1 + lr * l2. Group: shrink every run of
    `group_size` elements by lr * group in its 2-norm. Together L1 and L2 are the elastic net, L1 and group the sparse
    group lasso. Param groups may have penalties of their own. Unlike a weight decay, the L1 and group operators give
    exact zeros.

    Args:
        params: as of every `torch.optim` optimizer; float32.
        inner: factory of the optimizer, without weight decay of its own.
        l1, l2, group: strengths of the penalties l1 * |w|, l2 / 2 * |w|^2, and group * (2-norm of each run).
        group_size: elements in a run.

    Source: Parikh, Boyd, "Proximal Algorithms", 2014, section 6.5.
    """

    def __init__(
        self, params: Any, inner: Callable[..., Optimizer], l1: float = 0.0, l2: float = 0.0, group: float = 0.0,
        group_size: int = 1,
    ) -> None:  # fmt: skip
        self.inner = inner(params)
        if any(g.get("weight_decay") for g in self.inner.param_groups):
            raise ValueError("the optimizer decays weights itself: set its weight_decay to 0 and use l2 for that")
        if any("lr" not in g for g in self.inner.param_groups):
            raise ValueError("the optimizer has no learning rate, which a proximal operator needs: use SGD")
        super().__init__(self.inner.param_groups, {"l1": l1, "l2": l2, "group": group, "group_size": group_size})
        self.inner.param_groups = self.param_groups  # one list: schedulers and snapshots see this one
        self.inner.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = self.inner.step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _prox(parameter, group)
        return loss


def _prox(weights: Tensor, group: dict[str, Any]) -> None:
    rate = group["lr"]
    if group["l1"]:
        weights.copy_(torch.nn.functional.softshrink(weights, rate * group["l1"]))
    if group["l2"]:
        weights.div_(1 + rate * group["l2"])
    if group["group"]:
        whole = weights.numel() - weights.numel() % group["group_size"]  # behind it lies padding
        runs = weights.view(-1)[:whole].view(-1, group["group_size"])
        norms = runs.norm(dim=1, keepdim=True)
        runs.mul_((1 - rate * group["group"] / norms.clamp_min(1e-30)).clamp_min_(0))
