"""A Sandblaster replica's gradients: of one portion at a time, and the weighted sum of those that count."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from squall.protocol.effects import Compute, Effect, End, Keep, UseWeights
from squall.protocol.events import Event, GradientComputed
from squall.runtime.backward import Backward, pin
from squall.runtime.compute import all_finite
from squall.runtime.driver import Host
from squall.runtime.job import Job


class PortionGradients:
    """Computes at the weights in `weights`, and sums into `summed`, both float32 [length] in the arena."""

    def __init__(self, backward: Backward, summed: Tensor) -> None:
        self.backward = backward
        self._summed = summed
        device = backward.device
        self._vector = torch.zeros_like(summed, device=device) if device.type != "cpu" else summed
        self._views = backward.layout.views(self._vector)

    def compute(self, effect: Compute) -> GradientComputed:
        """Gradient of one portion, left where autograd made it."""
        started = time.perf_counter()
        loss = self.backward.differentiate(self.backward.load(effect))
        finite = self.backward.finish() and math.isfinite(loss)
        finite = finite and all_finite([p.grad for p in self.backward.on_vector.parameters if p.grad is not None])
        return GradientComputed(loss, finite, time.perf_counter() - started)

    def keep(self, effect: Keep) -> None:
        """The gradient computed last counts."""
        if not effect.accumulate:
            self._vector.zero_()
        pairs = [(v, p.grad) for v, p in zip(self._views, self.backward.on_vector.parameters) if p.grad is not None]
        torch._foreach_add_([view for view, _ in pairs], [g for _, g in pairs], alpha=effect.weight)
        if self._vector is not self._summed:
            self._summed.copy_(self._vector, non_blocking=True)
            torch.cuda.current_stream(self.backward.device).synchronize()


class PortionHost(Host):
    """A replica's model, its portions, and its slot of the arena."""

    def __init__(self, job: Job, slot: int) -> None:
        weights, summed, device = job.arena.weights(slot, 0), job.arena.gradient(slot, 0), job.device(slot)
        if device.type == "cuda":
            pin(weights)
            pin(summed)
        backward = Backward(job.task, job.layout, [weights], job.plan.seed, device)
        self.training = PortionGradients(backward, summed)

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case Compute():
                return self.training.compute(effect)
            case Keep():
                self.training.keep(effect)
            case UseWeights(buffer):
                self.training.backward.on_vector.use(buffer)
            case End():
                self.training.backward.batches.close()
            case _:
                raise AssertionError(f"a replica cannot {effect!r}")
        return None
