"""Metrics: functions of a batch, averaged over the examples, and objects that see all batches before they tell."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Batch = Any
# A function of a batch, an object with update and compute, a factory of one, or a pair: such an object or factory, and
# a function of model and batch that returns what its update takes.
Metric = Callable[[nn.Module, Batch], "Tensor | float"] | Any


class Averaged:
    """A function of a batch: a value for each of its examples, or one number, their mean."""

    def __init__(self, name: str, function: Callable[[nn.Module, Batch], Any]) -> None:
        self._name = name
        self._function = function
        self._sum, self._examples = 0.0, 0

    def add(self, model: nn.Module, batch: Batch, count: int) -> None:
        found = self._function(model, batch)
        self._examples += count
        if isinstance(found, Tensor) and found.ndim:
            if found.shape[0] != count:
                raise self._wrong(list(found.shape), count)
            self._sum += found.float().flatten(1).mean(1).sum().item() if found.ndim > 1 else found.float().sum().item()
            return
        try:
            self._sum += float(found) * count
        except (TypeError, ValueError):
            raise self._wrong(type(found).__name__, count) from None

    def value(self) -> float:
        return self._sum / self._examples

    def _wrong(self, found: object, count: int) -> ValueError:
        return ValueError(
            f"metric {self._name!r} must give one value per example, shape [{count}], or their mean: it gave {found}"
        )


class Whole:
    """An object that is fed all batches and then tells one number, as those of torchmetrics."""

    def __init__(self, name: str, metric: Any, inputs: Callable[[nn.Module, Batch], Any], device: torch.device) -> None:
        self._name = name
        self._inputs = inputs
        self._metric = metric
        if hasattr(metric, "reset"):
            metric.reset()
        if hasattr(metric, "to"):
            metric.to(device)

    def add(self, model: nn.Module, batch: Batch, count: int) -> None:
        if self._inputs is _pair and not (isinstance(batch, list | tuple) and len(batch) == 2):
            raise ValueError(
                f"metric {self._name!r} is fed model(batch[0]) and batch[1], and a batch is no pair: give"
                " (metric, function), where function(model, batch) returns what its update takes"
            )
        self._metric.update(*self._inputs(model, batch))

    def value(self) -> float:
        return self._number(self._metric.compute())

    def check(self) -> None:
        """Raise a `ValueError` if the metric computes no number. It may raise if one batch is too little."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = self._metric.compute()
            except Exception:
                return
        self._number(found)

    def _number(self, found: Any) -> float:
        try:
            return float(found)
        except (TypeError, ValueError, RuntimeError):
            shown = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"metric {self._name!r} must compute one number: it computed {shown}") from None


def begin(name: str, metric: Metric, device: torch.device) -> Averaged | Whole:
    """A metric at the start of an evaluation; what the user gave stays as it is. Raises `ValueError` with its name."""
    given: Any
    given, inputs = metric if isinstance(metric, tuple) and len(metric) == 2 else (metric, None)
    if not isinstance(given, type) and _is_whole(given):
        return Whole(name, copy.deepcopy(given), inputs or _pair, device)
    if inputs is not None or _makes_whole(given):
        made = given() if callable(given) else given
        if not _is_whole(made):
            raise ValueError(f"metric {name!r} must have update and compute, or make what has: it made {made!r}")
        return Whole(name, made, inputs or _pair, device)
    if not callable(given):
        raise ValueError(
            f"metric {name!r} is {given!r}: give a function of (model, batch), or what has update, compute"
        )
    return Averaged(name, given)


def check_metrics(metrics: Mapping[str, Metric], model: nn.Module, batch: Batch, count: int) -> None:
    """Raise a `ValueError` for a metric that does not work, as far as one batch shows that."""
    for name, metric in metrics.items():
        begun = begin(name, metric, torch.device("cpu"))
        with torch.no_grad():
            begun.add(model, batch, count)
        if isinstance(begun, Whole):
            begun.check()


def _pair(model: nn.Module, batch: Batch) -> tuple[Any, Any]:
    return model(batch[0]), batch[1]


def _is_whole(value: object) -> bool:
    return callable(getattr(value, "update", None)) and callable(getattr(value, "compute", None))


def _makes_whole(value: object) -> bool:
    """Whether this makes a metric: a class, a partial of one, or a function without arguments."""
    made = value.func if isinstance(value, partial) else value
    if isinstance(made, type):
        return _is_whole(made)
    code = getattr(made, "__code__", None)
    return code is not None and code.co_argcount == 0 and not code.co_flags & 0x04
