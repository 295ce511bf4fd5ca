"""A replica's numbers: from a batch and a weights buffer to a gradient buffer. The only user of devices.

On the CPU every `p.data` is a view into the weights buffer, so that a fetch is visible the moment it is done.
Autograd keeps its own fresh gradients (`p.grad = None` before each backward), which are copied into the gradient
buffer once: measured 10 to 15 % faster than zeroing and accumulating in place. On a GPU the views lie in a device
copy of the vector, and one asynchronous copy each way goes through the pinned arena.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from squall.protocol.core import Compute, GradientComputed
from squall.runtime.batches import Batches, to_device
from squall.runtime.seeds import mix, seed_everything
from squall.task import Batch, Task
from squall.vector import Layout


def resolve_device(name: str) -> torch.device:
    """Raises `ValueError` for a device that this machine does not have."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not one that torch knows: use 'cpu', 'cuda' or 'cuda:1'") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r}: replicas compute on 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: torch sees no CUDA GPU here; `squall doctor` says why, or use device='cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r}: this machine has {torch.cuda.device_count()} GPUs, counted from 0")
    return device


class ModelOnVector:
    """A model whose parameters and floating buffers are those of a weights buffer."""

    def __init__(self, model: nn.Module, layout: Layout, buffers: Sequence[Tensor], device: torch.device) -> None:
        self.model = model.to(device)
        self.layout = layout
        self.device = device
        self.parameters = layout.parameters_of(model)
        self._sources = buffers
        on_device = device.type != "cpu"
        self._vectors = [torch.empty_like(b, device=device) for b in buffers[:1]] if on_device else list(buffers)
        self._views = [layout.views(v) for v in self._vectors]
        self._used = -1

    def use(self, buffer: int) -> None:
        """Compute on this weights buffer from now on."""
        if self.device.type != "cpu":
            self._vectors[0].copy_(self._sources[buffer], non_blocking=True)
        elif self._used == buffer and not self.layout.buffers:
            return
        index = buffer if self.device.type == "cpu" else 0
        if self._used != index:
            for parameter, view in zip(self.parameters, self._views[index]):
                parameter.data = view
            self._used = index
        if self.layout.buffers:
            with torch.no_grad():
                self.layout.read_buffers(self._vectors[index], self.model)


class Gradients:
    """Computes gradients for one replica."""

    def __init__(
        self, task: Task, layout: Layout, weights: Sequence[Tensor], gradients: Sequence[Tensor],
        rates: Sequence[Tensor], seed: int, device: torch.device,
    ) -> None:  # fmt: skip
        self.task = task
        self.layout = layout
        self.device = device
        self.on_vector = ModelOnVector(task.model, layout, weights, device)
        self.batches = Batches(task, seed)
        self._seed = seed
        self._rates = rates
        self._rate = rates[0]
        self._arena = gradients
        on_device = device.type != "cpu"
        # Never cleared: the arena's pages begin as zeros and nothing writes the padding, while a shard may still read
        # what this replica's predecessor in the slot has pushed.
        self._vectors = [torch.zeros_like(g, device=device) for g in gradients] if on_device else list(gradients)
        self._views = [layout.views(v) for v in self._vectors]
        self._group_of = _group_of(layout)
        self._trained = False  # some parameter got a gradient
        task.model.train()

    def use(self, buffer: int) -> None:
        self.on_vector.use(buffer)
        self._rate = self._rates[buffer]

    def compute(self, effect: Compute) -> GradientComputed:
        """Gradient of the batch that the effect names, into the buffer that it names."""
        started = time.perf_counter()
        batch = self.batches.load(effect.epoch, effect.start, effect.stop)
        seed_everything(mix(self._seed, effect.epoch, effect.start, 1), self.device)
        loss = self._backward(to_device(batch, self.device) if self.device.type != "cpu" else batch)
        finite = self._gather(effect.buffer, effect.accumulate, loss)
        if finite:
            if effect.local_step:
                self._local_step()
            self._push_buffers(effect.buffer)
            self._to_arena(effect.buffer)
        return GradientComputed(loss, finite, time.perf_counter() - started)

    def _backward(self, batch: Batch) -> float:
        for parameter in self.on_vector.parameters:
            parameter.grad = None
        autocast = (
            torch.autocast(self.device.type, self.task.autocast)
            if self.task.autocast is not None
            else contextlib.nullcontext()
        )
        with autocast:
            loss = self.task.loss(self.on_vector.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def _gather(self, buffer: int, accumulate: bool, loss: float) -> bool:
        """Put the fresh gradients into the vector, unless one is not finite."""
        parameters, views = self.on_vector.parameters, self._views[buffer]
        if self.task.clip_norm is not None:
            for parameter in parameters:
                parameter.grad = _dense(parameter.grad)  # torch takes no norm of a sparse one
            total = nn.utils.clip_grad_norm_(parameters, self.task.clip_norm)
            if not math.isfinite(total.item()):
                return False
        fresh = [_dense(p.grad) for p in parameters]
        if any(g is None for g in fresh):  # parameters that this batch did not use
            missing = [view for view, g in zip(views, fresh) if g is None]
            if not accumulate:
                torch._foreach_zero_(missing)
            views = [view for view, g in zip(views, fresh) if g is not None]
        present = [g for g in fresh if g is not None]
        if not present and not self._trained:
            raise ValueError("Task.loss gave no gradient: it must use the model that it is given, not one it knows")
        self._trained = True
        if accumulate:
            if not math.isfinite(loss) or not math.isfinite(sum(g.sum().item() for g in present)):
                return False
            torch._foreach_add_(views, present)
            return True
        if present:
            torch._foreach_copy_(views, present)
        # One sum shows any NaN or Inf; finite gradients would have to exceed 1e31 to overflow it.
        total = self._vectors[buffer][: self.layout.tail].sum()
        return math.isfinite(loss) and math.isfinite(total.item())

    def _local_step(self) -> None:
        """SGD on the replica's own weights until the next fetch, with the shards' current learning rates."""
        pairs = [(own, p.data, _dense(p.grad)) for own, p in zip(self._group_of, self.on_vector.parameters)]
        with torch.no_grad():
            for group, rate in enumerate(self._rate.tolist()):
                chosen = [(weights, g) for own, weights, g in pairs if own == group and g is not None]
                if chosen:
                    torch._foreach_add_([w for w, _ in chosen], [g for _, g in chosen], alpha=-rate)

    def _push_buffers(self, buffer: int) -> None:
        """BatchNorm's statistics and other floating buffers travel as they are, in the tail."""
        if not self.layout.buffers:  # the usual case; to find that out below would walk the model
            return
        vector = self._vectors[buffer]
        for view, own in zip(self.layout.buffer_views(vector), self.layout.buffers_of(self.on_vector.model)):
            view.copy_(own)

    def _to_arena(self, buffer: int) -> None:
        if self.device.type == "cuda":
            self._arena[buffer].copy_(self._vectors[buffer], non_blocking=True)
            torch.cuda.current_stream(self.device).synchronize()


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _group_of(layout: Layout) -> list[int]:
    """For each parameter, in the vector's order, the number of its group."""
    starts = layout.group_starts
    return [max(g for g, start in enumerate(starts) if start <= span.start) for span in layout.parameters]


def pin(memory: Tensor) -> None:
    """Page-lock shared memory for asynchronous copies; where the driver refuses, copies are merely slower."""
    with contextlib.suppress(RuntimeError):
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostRegister(memory.data_ptr(), memory.numel() * memory.element_size(), 0)
