"""The task of a script, which becomes known in two parts: the model and its optimizer first, the data later."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from squall.task import Batch, Task


class Counted(Dataset[Any]):
    """A dataset of so many examples, for processes that count examples and never load one."""

    def __init__(self, examples: int) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return self._examples


class Steps(Counted):
    """The dataset of a loop that makes its batches itself: it is dealt the numbers of its steps."""

    def __init__(self, examples: int, step_examples: int) -> None:
        super().__init__(examples)
        self._step_examples = step_examples

    def number(self, start: int) -> int:
        """The number of the step whose first example this is."""
        return start // self._step_examples


def joined_task(model: nn.Module, options: dict[str, Any]) -> Task:
    """What is known of the task when the script joins: all but the data."""
    return Task(model=model, loss=no_loss, train=Counted(1), **options)


def no_loss(model: nn.Module, batch: Batch) -> Tensor:
    raise AssertionError("a session's loss is its script's")
