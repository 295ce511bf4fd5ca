"""The validation loss and the task's metrics, as means over the examples."""

from __future__ import annotations

import contextlib
from collections.abc import Sized
from typing import cast

import torch
from torch import nn

from squall.blame import note
from squall.runtime.batches import to_device, validation_batches
from squall.task import Task, check_metric


def evaluate(task: Task, model: nn.Module, device: torch.device, *, loss: bool = True) -> dict[str, float]:
    """{"loss": ..., metric: ...} over `task.validate`; without the loss, if it is not wanted.

    Leaves the model in the mode that it was in.
    """
    assert task.validate is not None
    was_training = model.training
    model.eval()
    sums: dict[str, float] = dict.fromkeys(["loss"] * loss + [*task.metrics], 0.0)
    total = len(cast(Sized, task.validate))
    autocast = torch.autocast(device.type, task.autocast) if task.autocast is not None else contextlib.nullcontext()
    at, what = 0, "the dataset"  # what is under way
    try:
        with torch.no_grad(), autocast:
            for count, batch in validation_batches(task):
                moved = to_device(batch, device)
                if loss:
                    what = "the loss"
                    sums["loss"] += task.loss(model, moved).item() * count
                for name, metric in task.metrics.items():
                    what = f"metric {name!r}"
                    sums[name] += _per_example(name, metric(model, moved), count)
                at, what = at + count, "the dataset"
    except Exception as error:
        note(error, f"in {what}, on validation examples from {at} on", evaluating=what, start=at)
        raise
    finally:
        model.train(was_training)
    return {name: value / total for name, value in sums.items()}


def _per_example(name: str, values: torch.Tensor, count: int) -> float:
    check_metric(name, values, count)
    return values.float().flatten(1).mean(1).sum().item() if values.ndim > 1 else values.float().sum().item()
