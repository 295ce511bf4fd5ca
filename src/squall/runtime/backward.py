"""A batch's loss and fresh gradients, on a model whose parameters lie in a vector. The only user of devices.

On the CPU every `p.data` is a view into a weights buffer, so that a fetch is visible the moment it is done. On a GPU
the views lie in a device copy of the vector, and one asynchronous copy each way goes through the pinned arena.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from squall.protocol.effects import Compute
from squall.runtime.batches import TrainingBatches, to_device
from squall.runtime.seeds import mix, seed_everything
from squall.task import Batch, Task, loss_and_extras
from squall.usercode.blame import note_batch
from squall.vector import Layout, count_in, put_count


def named_device(name: str) -> torch.device:
    """Raises `ValueError` for what is no device that replicas compute on."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not one that torch knows: use 'cpu', 'cuda' or 'cuda:1'") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r}: replicas compute on 'cpu' or 'cuda'")
    return device


def resolve_device(name: str) -> torch.device:
    """Raises `ValueError` for a device that this machine does not have."""
    device = named_device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: torch sees no CUDA GPU here; `squall doctor` says why, or use device='cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r}: this machine has {torch.cuda.device_count()} GPUs, counted from 0")
    return device


class ModelOnVector:
    """A model whose parameters and buffers are those of a weights buffer."""

    def __init__(self, model: nn.Module, layout: Layout, buffers: Sequence[Tensor], device: torch.device) -> None:
        self.model = model.to(device)
        self.layout = layout
        self.device = device
        self.parameters = layout.parameters_of(model)
        self._sources = buffers
        self._in_place = all(buffer.device.type == device.type for buffer in buffers)  # else a copy on the device
        self._vectors = list(buffers) if self._in_place else [torch.empty_like(buffers[0], device=device)]
        self._views = [layout.views(v) for v in self._vectors]
        self._has_buffers = layout.tail < layout.length
        self._used = -1

    def use(self, buffer: int) -> None:
        """Compute on this weights buffer from now on."""
        if not self._in_place:
            self._vectors[0].copy_(self._sources[buffer], non_blocking=True)
        elif self._used == buffer and not self._has_buffers:
            return
        index = buffer if self._in_place else 0
        if self._used != index:
            for parameter, view in zip(self.parameters, self._views[index]):
                parameter.data = view
            self._used = index
        if self._has_buffers:
            with torch.no_grad():
                self.layout.read_buffers(self._vectors[index], self.model)


class Backward:
    """Loads a batch, seeds all randomness from the batch's place in the run, and leaves fresh gradients.

    Gradients lie where autograd made them (`p.grad = None` before), dense, and clipped if the task asks for that.
    """

    def __init__(self, task: Task, layout: Layout, weights: Sequence[Tensor], seed: int, device: torch.device) -> None:
        self.task = task
        self.layout = layout
        self.device = device
        self.on_vector = ModelOnVector(task.model, layout, weights, device)
        self.batches = TrainingBatches(task, seed)
        self._seed = seed
        self._counted: list[Tensor] = []  # counters, as they were before the batch
        self._at: Compute  # the batch loaded last
        self.extras: dict[str, float] | None = None  # of the batch that was differentiated last
        self._trained = False  # some parameter got a gradient
        self.loss: Callable[[Batch], Any] = partial(task.loss, task.model)  # of a batch, as the task's loss returns it
        task.model.train()

    def load(self, effect: Compute) -> Batch:
        """The batch that the effect names, with nothing left of the gradients of the one before."""
        self._at = effect
        batch = self.batches.load(effect.epoch, effect.start, effect.stop)
        self.count()
        seed_everything(mix(self._seed, effect.epoch, effect.start, 1), self.device)
        for parameter in self.on_vector.parameters:
            parameter.grad = None
        return to_device(batch, self.device) if self.device.type != "cpu" else batch

    def count(self) -> None:
        """Remember what the model's counters show: the shards know that much, and a push says what was added since."""
        self._counted = [counter.double() for counter in self.layout.counters_of(self.on_vector.model)]

    def differentiate(self, batch: Batch, scale: float = 1.0) -> float:
        """The loss, whose gradients, times `scale`, are there when this returns."""
        autocast = (
            torch.autocast(self.device.type, self.task.autocast)
            if self.task.autocast is not None
            else contextlib.nullcontext()
        )
        try:
            with autocast:
                loss, self.extras = loss_and_extras(self.loss(batch))
            (loss if scale == 1.0 else loss * scale).backward()
            value: float = loss.item()
            return value
        except Exception as error:
            note_batch(error, self._at.epoch, self._at.start, self._at.stop)
            raise

    def finish(self) -> bool:
        """Make fresh gradients dense, and clip them; whether their norm is finite, where it was asked for.

        Raises `ValueError` if the first batch gave no parameter a gradient.
        """
        parameters, finite = self.on_vector.parameters, True
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:  # torch takes no norm of a sparse one
                parameter.grad = parameter.grad.to_dense()
        if self.task.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(parameters, self.task.clip_norm)
            finite = math.isfinite(norm.item())
        if not self._trained and all(parameter.grad is None for parameter in parameters):
            raise ValueError("Task.loss gave no gradient: it must use the model that it is given, not one it knows")
        self._trained = True
        return finite

    def push_buffers(self, vector: Tensor, accumulate: bool) -> None:
        """Floating buffers travel as they are, in the vector's tail; counters by what the push's batches have added."""
        views = self.layout.counter_views(vector)
        earlier = [count_in(view) if accumulate else 0.0 for view in views]
        self.layout.write_buffers(self.on_vector.model, vector)
        for view, before, so_far in zip(views, self._counted, earlier):
            put_count(view, count_in(view) - before + so_far)


def pin(memory: Tensor) -> None:
    """Page-lock shared memory for asynchronous copies; where the driver refuses, copies are merely slower."""
    with contextlib.suppress(RuntimeError):
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostRegister(memory.data_ptr(), memory.numel() * memory.element_size(), 0)
