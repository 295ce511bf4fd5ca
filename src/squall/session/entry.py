"""`squall.join`: how an ordinary PyTorch loop takes part, as one replica of those of `squall run`, or alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from squall.runtime.optimizers import build_optimizer
from squall.session.alone import AloneBackend
from squall.session.backend import SessionBackend
from squall.session.optimizer import Groups, taken_apart
from squall.session.script_task import joined_task
from squall.session.session import Session
from squall.strategies.base import default_optimizer
from squall.task import OptimizerFactory

# Makes the backend of `join` under `squall run`: it forks this process into replicas (`launchers.scripts`).
launched: Callable[[nn.Module, OptimizerFactory | None, dict[str, Any]], SessionBackend] | None = None


def join(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | OptimizerFactory | None = None,
    *,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    schedule: Callable[[Optimizer], LRScheduler] | None = None,
    clip_norm: float | None = None,
) -> Session:
    """Take part in a training: as one replica of several under `squall run`, or alone under `python`.

    Under `squall run` a script runs once on each machine until here, and from here on once per replica: what comes
    before is shared there, and must not touch a GPU or start threads.

    Args:
        model: any `nn.Module` with float32 parameters, on the CPU, with its initial weights; or several.
        optimizer: the optimizer, of which the class, the settings and the param groups are taken; or several of one
            class, which become `Session.optimizers`; or a factory, `partial(torch.optim.SGD, lr=0.1)`. Flags of
            `squall run` come first.
        groups: as of `squall.Task`; an optimizer has its own.
        schedule: as of `squall.Task`.
        clip_norm: as of `squall.Task`.

    Raises:
        ValueError: the optimizer does not train this model, or has stepped already; or the strategy cannot make an
            update of every step, which several optimizers need.

    Example:
        >>> import squall, torch
        >>> session = squall.join(torch.nn.Linear(4, 2))
        >>> session.rank, session.replicas, session.is_leader
        (0, 1, True)
    """
    model = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    shown: list[Groups] = []
    if isinstance(optimizer, Optimizer | Sequence):
        own = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        if groups is not None:
            raise ValueError("groups is set, and the optimizer has param groups of its own: leave groups out")
        if clip_norm is not None and len(own) > 1:
            raise ValueError("clip_norm is set, and there are several optimizers: clip in the loop, before each step")
        optimizer, groups = taken_apart(own, model)
        shown = [each.param_groups for each in own]
    options = {"groups": groups, "schedule": schedule, "clip_norm": clip_norm}
    if not shown and optimizer is not None:
        shown = [build_optimizer(optimizer, joined_task(model, options).param_groups()).param_groups]
    backend = (
        launched(model, optimizer, options) if launched is not None else AloneBackend(optimizer or default_optimizer)
    )
    return Session(model, backend, options, shown)
