"""A batch's loss and fresh gradients, on a model whose parameters lie in a vector. The only user of devices.

On the CPU every `p.data` is a view into a weights buffer, so that a fetch is visible the moment it is done. On a GPU
the views lie in a device copy of the vector, and one asynchronous copy each way goes through the pinned arena.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from squall.protocol.effects import Compute
from squall.runtime.batches import TrainingBatches, to_device
from squall.runtime.inside import Alone, Inside, dense, local
from squall.runtime.seeds import mix, seed_everything
from squall.task import Batch, Task
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
                local(parameter).data = view
            self._used = index
        if self._has_buffers:
            with torch.no_grad():
                self.layout.read_buffers(self._vectors[index], self.model)


class Backward:
    """Loads a batch, seeds all randomness from the batch's place in the run, and leaves fresh gradients.

    Gradients lie where autograd made them (`p.grad = None` before), dense, and clipped if the task asks for that.
    """

    def __init__(
        self, task: Task, layout: Layout, weights: Sequence[Tensor], seed: int, device: torch.device,
        inside: Inside | None = None,
    ) -> None:  # fmt: skip
        """`inside`: this process's place in a replica of several."""
        self.task = task
        self.inside = Alone(layout, device) if inside is None else inside
        self.layout = self.inside.writes
        self.device = device
        self.on_vector = ModelOnVector(task.model, self.inside.reads, weights, device)
        self.parameters = self.layout.parameters_of(task.model)  # whose gradients this process answers for
        self.batches = TrainingBatches(task, seed)
        self._seed = seed
        self._counted: list[Tensor] = []  # counters, as they were before the batch
        self._at: Compute  # the batch loaded last
        self.extras: dict[str, float] | None = None  # of the batch that was differentiated last
        self._chance = 0  # the seed of that batch
        self._trained = False  # some parameter got a gradient
        task.model.train()

    def load(self, effect: Compute) -> Batch:
        """The batch that the effect names, with nothing left of the gradients of the one before."""
        self._at = effect
        batch = self.batches.load(effect.epoch, effect.start, effect.stop)
        self.count()
        self._chance = mix(self._seed, effect.epoch, effect.start, 1)
        seed_everything(self._chance, self.device)
        for parameter in self.on_vector.parameters:
            parameter.grad = None
        return to_device(batch, self.device) if self.device.type != "cpu" else batch

    def count(self) -> None:
        """Remember what the model's counters show: the shards know that much, and a push says what was added since."""
        self._counted = [counter.double() for counter in self.layout.counters_of(self.on_vector.model)]

    def differentiate(self, batch: Batch, into: Sequence[Tensor] | None = None) -> float:
        """The loss, whose gradients are there when this returns; some may lie in `into` at once, a view for each."""
        try:
            loss, self.extras = self.inside.compute(self.task, self.on_vector.model, batch, self._chance, into)
            return loss
        except Exception as error:
            note_batch(error, self._at.epoch, self._at.start, self._at.stop)
            raise

    def finish(self) -> bool:
        """Make fresh gradients dense, and clip them; whether their norm is finite, where it was asked for.

        Raises `ValueError` if the first batch gave no parameter a gradient.
        """
        fresh = [gradient for gradient in self.fresh() if gradient is not None]
        return self.task.clip_norm is None or math.isfinite(self.inside.clip(fresh, self.task.clip_norm))

    def fresh(self) -> list[Tensor | None]:
        """Those gradients, dense. Raises `ValueError` as `finish` does."""
        dense(self.parameters)
        fresh = self.gradients()
        if not self._trained and not self.inside.looked and all(gradient is None for gradient in fresh):
            raise ValueError("Task.loss gave no gradient: it must use the model that it is given, not one it knows")
        self._trained = True
        return fresh

    def gradients(self) -> list[Tensor | None]:
        """Of `parameters`, where autograd made them."""
        return [local(parameter.grad) for parameter in self.parameters]

    @property
    def spoilt(self) -> bool:
        """The weights that are computed on are not finite, or so large that their squares are not."""
        squares = (local(parameter).detach().float().square().sum() for parameter in self.parameters)
        return not all(math.isfinite(each.item()) for each in squares)

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
