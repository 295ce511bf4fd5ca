"""A session as a `torch.optim.Optimizer`, for loops that step one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from squall.session import Session


class SessionOptimizer(Optimizer):
    """Steps a session. The learning rate is the strategy's; the one shown here is a factor of it, which must stay 1."""

    def __init__(self, session: Session) -> None:
        super().__init__(session._model.parameters(), {"lr": 1.0})
        self._session = session

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            if group["lr"] != 1.0:
                raise ValueError(
                    f"a scheduler set the learning rate of session.optimizer to {group['lr']:.4g}, which has no effect:"
                    " the rate belongs to the strategy. Give the schedule to squall.join(model, schedule=...), and a"
                    " constant one to the loop that steps this optimizer"
                )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._session.step(loss)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: every batch begins with fresh gradients."""
