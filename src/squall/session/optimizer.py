"""A session as a `torch.optim.Optimizer`, for loops that step one; and a script's own optimizer, taken apart."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from squall.protocol.messages import Factors
from squall.task import OptimizerFactory

if TYPE_CHECKING:
    from squall.session.session import Session

Groups = list[dict[str, Any]]


class SessionOptimizer(Optimizer):
    """Steps a session: `step` is the exchange.

    Its param groups are those of the optimizer that was given to `join`. A loop or a scheduler may set their learning
    rates at any step: how many times the rate that a group began with travels with the push, and the step is made at
    that. Where `join` was given no optimizer the rates shown are factors themselves, and begin with 1.
    """

    def __init__(self, session: Session, groups: Groups, others: tuple[int, int] = (0, 0)) -> None:
        """`others`: how many groups other optimizers of the session have before these and behind them."""
        super().__init__(groups, {"lr": 1.0})
        self._session = session
        self._others = others
        self._first = [float(group["lr"]) for group in self.param_groups]
        self._fixed = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in self.param_groups]
        self._rates = self._first
        self._factors: Factors = ()  # that belong to those rates

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raises as `Session.step` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._session._step(self, loss)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. Those of a batch that was not stepped are lost, so the batch is left out."""
        lost = any(parameter.grad is not None for group in self.param_groups for parameter in group["params"])
        self._session._gradients_cleared(lost)
        super().zero_grad(set_to_none)

    def factors(self) -> Factors:
        """What each group's first learning rate is multiplied by now; None for groups of other optimizers."""
        if len(self.param_groups) != len(self._first):
            raise ValueError("a param group was added to session.optimizer: give all to the optimizer before join")
        for number, (group, fixed) in enumerate(zip(self.param_groups, self._fixed)):
            for name, value in fixed.items():
                if group[name] is not value and group[name] != value:
                    raise ValueError(
                        f"the loop set {name!r} of param group {number} to {group[name]!r}, which has no effect: of an"
                        " optimizer's settings only the learning rate can change while it trains"
                    )
        rates = [float(group["lr"]) for group in self.param_groups]
        if rates != self._rates:
            factors = tuple(_factor(*pair) for pair in zip(self._first, rates))
            self._rates, self._factors = rates, factors if any(factor != 1.0 for factor in factors) else ()
        before, behind = self._others
        if before or behind:
            return (None,) * before + (self._factors or (1.0,) * len(rates)) + (None,) * behind
        return self._factors


def _factor(first: float, wanted: float) -> float:
    """What `first` is multiplied by to give `wanted`, exactly where a float can express it."""
    if not (math.isfinite(wanted) and wanted >= 0):
        raise ValueError(f"the loop set a learning rate of {wanted}: it must be 0 or more")
    if first == 0.0 and wanted > 0:
        raise ValueError(
            f"the loop set a learning rate of {wanted:.4g} where it began with 0, and what travels is a factor: give"
            " the optimizer the largest rate before join"
        )
    near = wanted / first if wanted != first else 1.0
    candidates = (near, math.nextafter(near, 0), math.nextafter(near, 2 * near))
    return next((factor for factor in candidates if first * factor == wanted), near)


def taken_apart(
    optimizers: Sequence[Optimizer], model: nn.Module
) -> tuple[OptimizerFactory, Callable[[nn.Module], Groups]]:
    """The factory and the param groups that make one optimizer of these, which step no more themselves.

    Raises `ValueError` if they train what is not the model's, the same twice, or have trained already.
    """
    kinds = {type(optimizer): None for optimizer in optimizers}
    if len(kinds) > 1:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"the optimizers are {names}: give all one class, whose settings may differ by group")
    own = {id(parameter) for parameter in model.parameters()}
    all_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    found = [id(parameter) for group in all_groups for parameter in group["params"]]
    if not own.issuperset(found):
        raise ValueError("the optimizer has a parameter that is not the model's: give squall.join all that is trained")
    if len(set(found)) < len(found):
        raise ValueError("two optimizers have the same parameter: give each parameter to one of them")
    if any(optimizer.state for optimizer in optimizers):
        raise ValueError("the optimizer has stepped already: call squall.join before the first step")
    (kind,), defaults = kinds, optimizers[0].defaults
    usual = {name: p.default for name, p in inspect.signature(kind).parameters.items()}
    chosen = {k: v for k, v in defaults.items() if k in usual and (k == "lr" or not _same(v, usual[k]))}
    groups = [
        {k: v for k, v in group.items() if k == "params" or (k in defaults and not _same(v, defaults[k]))}
        for group in all_groups
    ]
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(_refuse)
    return partial(kind, **chosen), lambda _: [dict(group) for group in groups]


def _same(value: object, other: object) -> bool:
    return value is other or bool(value == other)


def _refuse(*_: object) -> NoReturn:
    raise RuntimeError(
        "this optimizer was given to squall.join, and would move this replica alone: step session.optimizer instead"
    )
