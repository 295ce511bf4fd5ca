"""The task of a script, which becomes known in two parts: the model and its optimizer first, the data later."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from squall.runtime.batches import Counted
from squall.task import Batch, Task


def joined_task(model: nn.Module, options: dict[str, Any]) -> Task:
    """What is known of the task when the script joins: all but the data."""
    return Task(model=model, loss=no_loss, train=Counted(1), **options)


def no_loss(model: nn.Module, batch: Batch) -> Tensor:
    raise AssertionError("a session's loss is its script's")
