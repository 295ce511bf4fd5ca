"""What the processes of a replica do to compute one batch together; a replica of one process computes alone."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from squall.task import Batch, Task, loss_and_extras
from squall.vector import Layout

if TYPE_CHECKING:
    from squall.parts.neighbours import Neighbours

Computed = tuple[float, dict[str, float] | None]  # the loss of a batch, and the numbers beside it


class Inside(ABC):
    """One process's place in its replica.

    Attributes:
        neighbours: the way to the others.
        reads: what this process computes with of the weights.
        writes: what it answers for: its gradients, its buffers. Those of a replica's processes make up the whole.
        looked: the processes have agreed that loss and gradients are finite when `compute` returns, or it is NaN.
        built: the parameters that the process was forked with. Freed, they would be pages of its own as soon as
            something else lies there; kept, they cost nothing.
        speaks: the replica's machine is in this process.
    """

    neighbours: Neighbours
    reads: Layout
    writes: Layout
    looked: bool
    built: Sequence[Tensor] = ()
    speaks: bool = True

    @abstractmethod
    def compute(self, task: Task, model: nn.Module, batch: Batch, seed: int, into: Sequence[Tensor] | None) -> Computed:
        """Forward and backward. The gradients of what this process writes are in its parameters' `grad`.

        `into` has a view for each of those, which may become its gradient's place at once. None: what comes next
        depends on whether all is finite.
        """

    @abstractmethod
    def clip(self, gradients: Sequence[Tensor], most: float) -> float:
        """Scale the replica's gradient down to this 2-norm; the norm it had. Every process has its own of them."""

    @abstractmethod
    def agreed(self, value: float) -> float:
        """The sum of what the replica's processes give, which all do at the same time."""


class Alone(Inside):
    """The whole model in one process."""

    looked = False

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.reads = self.writes = layout
        self._device = device
        self.wrapped: Callable[[Batch], Any] | None = None  # the task's loss, with something done around it
        self.scale = 1.0  # that gradients are multiplied by

    def compute(self, task: Task, model: nn.Module, batch: Batch, seed: int, into: Sequence[Tensor] | None) -> Computed:
        with computing(task, self._device):
            returned = task.loss(model, batch) if self.wrapped is None else self.wrapped(batch)
            loss, extras = loss_and_extras(returned)
        (loss if self.scale == 1.0 else loss * self.scale).backward()
        return loss.item(), extras

    def clip(self, gradients: Sequence[Tensor], most: float) -> float:
        norm = nn.utils.get_total_norm(gradients)
        scale(gradients, most, norm)
        return norm.item()

    def agreed(self, value: float) -> float:
        return value


def local(tensor: Any) -> Any:
    """What of a sliced tensor lies in this process; another tensor, or None, as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def dense(parameters: Sequence[Tensor]) -> None:
    """Make fresh gradients dense: torch takes no norm of a sparse one."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


def computing(task: Task, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The type that the task computes in."""
    return contextlib.nullcontext() if task.autocast is None else torch.autocast(device.type, task.autocast)


def scale(gradients: Sequence[Tensor], most: float, norm: Tensor) -> None:
    """As torch clips gradients of this norm."""
    if gradients:
        torch._foreach_mul_(list(gradients), torch.clamp(most / (norm + 1e-6), max=1.0))
