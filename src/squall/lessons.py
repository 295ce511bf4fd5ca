"""What a student learns from: its own task, in which the teacher's outputs lie beside each batch of the training set.

Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015: both outputs are softened by a
temperature T, and the student's loss is mixed with T^2 KL(teacher || student), so that the two gradients keep their
proportions whatever T is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax
from torch.utils.data import Dataset, TensorDataset, default_collate

from squall.task import Batch, Task, TaskFunction, loss_and_extras

KEPT = torch.float16  # of the teacher's outputs: half the disk, and far finer than what is learnt from them
Loss = Callable[[nn.Module, Batch], Any]


class Lesson(NamedTuple):
    """A batch of the student's training set, and what the teacher says of it."""

    batch: Batch
    outputs: Tensor  # of the type `KEPT`, shaped as the student's


class Collated(Dataset[Batch]):
    """Whole batches of a dataset, as its task collates them; each with the outputs of the same rows, if there are."""

    def __init__(self, task: Task, data: Dataset[Any], outputs: Path | None = None) -> None:
        self._data, self._outputs = data, outputs
        self._collate = task.loader.get("collate_fn") or default_collate
        self._rows: np.ndarray[Any, Any] | None = None

    def __len__(self) -> int:
        return len(cast(Sized, self._data))

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        batch = self._batch(indices)
        if self._outputs is None:
            return [batch]
        if self._rows is None:  # each process maps it for itself
            self._rows = np.load(self._outputs, mmap_mode="r")
        return [Lesson(batch, torch.from_numpy(self._rows[indices]))]

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])[0]

    def _batch(self, indices: list[int]) -> Batch:
        if type(self._data) is TensorDataset and self._collate is default_collate:
            return [tensor[indices] for tensor in self._data.tensors]
        several = getattr(self._data, "__getitems__", None)
        return self._collate(several(indices) if several is not None else [self._data[index] for index in indices])


@dataclass(frozen=True)
class Mixed:
    """The loss of a student.

    Attributes:
        loss: its own, on the labels.
        temperature: that both outputs are divided by before the softmax.
        mix: share of what the teacher says, 0 to 1; the rest is the student's own loss.
        dim: of outputs along which classes lie.
    """

    loss: Loss
    temperature: float
    mix: float
    dim: int

    def __call__(self, model: nn.Module, batch: Batch) -> Any:
        if not isinstance(batch, Lesson):  # of the validation set, where it is judged as any student is
            return self.loss(model, batch)
        returned, outputs = heard(self.loss, model, batch.batch)
        own, extras = loss_and_extras(returned)
        taught = self.temperature**2 * softened(outputs, batch.outputs, self.temperature, self.dim)
        told = {"labels": own.detach(), "teacher": taught.detach(), **(extras or {})}
        return (1 - self.mix) * own + self.mix * taught, told


def softened(student: Tensor, teacher: Tensor, temperature: float, dim: int) -> Tensor:
    """KL(teacher || student) of softened outputs: its mean over all but the classes, which lie along `dim`."""
    here = log_softmax(student.float() / temperature, dim)
    there = log_softmax(teacher.to(here) / temperature, dim)
    return kl_div(here, there, reduction="sum", log_target=True) / (here.numel() / here.shape[dim])


def heard(loss: Loss, model: nn.Module, batch: Batch) -> tuple[Any, Tensor]:
    """What the loss returns, and what the model returned to it. Raises `ValueError` where that is not one tensor."""
    found: list[Any] = []
    handle = model.register_forward_hook(lambda module, given, output: found.append(output))
    try:
        returned = loss(model, batch)
    finally:
        handle.remove()
    if len(found) != 1:
        raise ValueError(
            f"the student's Task.loss calls the model {len(found)} times for a batch: what it returns there is compared"
            " with the teacher's, so it has to be called once"
        )
    return returned, logits(found[0])


def logits(output: Any) -> Tensor:
    """Of a model's output: itself, or its `logits`, or the first of several. Raises `ValueError` if there are none."""
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    elif isinstance(output, Sequence) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise ValueError(f"a model's output is {type(output).__name__}: distillation needs a tensor, or its `logits`")
    return output


def taught(student: TaskFunction, outputs: Path, temperature: float, mix: float, dim: int) -> Task:
    """The student's task, with the teacher's outputs. Raises `ValueError` where these are not of this training set."""
    task = student()
    if not outputs.is_file():
        raise ValueError(f"{outputs} is not on this machine: have the directory on a file system that all of them see")
    rows, examples = len(np.load(outputs, mmap_mode="r")), len(cast(Sized, task.train))
    if rows != examples:
        raise ValueError(f"the training set has {examples:,} examples, and the teacher answered {rows:,}: begin anew")
    return replace(
        task, loss=Mixed(task.loss, temperature, mix, dim), train=Collated(task, task.train, outputs),
        validate=None if task.validate is None else Collated(task, task.validate), split=None,
        loader={**task.loader, "collate_fn": itemgetter(0)},
    )  # fmt: skip


def questions(student: TaskFunction) -> tuple[Task, Callable[[nn.Module, Batch], Tensor]]:
    """What the teacher is asked: the student's training set, and how its outputs for a batch are found."""
    task = student()
    return replace(task, validate=None), partial(answer, task.loss)


def answer(loss: Loss, model: nn.Module, batch: Batch) -> Tensor:
    """The teacher is called as the student's loss calls a model."""
    return heard(loss, model, batch)[1].to(KEPT)
