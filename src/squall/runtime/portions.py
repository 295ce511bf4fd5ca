"""A Sandblaster replica's gradients: of one portion at a time, and the weighted sum of those that count."""

from __future__ import annotations

import math
import time

import torch

from squall.protocol.effects import Compute, Effect, End, Keep, UseWeights
from squall.protocol.events import Event, GradientComputed
from squall.runtime.backward import Backward, pin
from squall.runtime.compute import all_finite
from squall.runtime.driver import Host
from squall.runtime.inside import Inside
from squall.runtime.job import Job


class PortionHost(Host):
    """A replica's model and its portions: computed at its weights in the arena, and summed in its gradient buffer."""

    def __init__(self, job: Job, slot: int, inside: Inside | None = None) -> None:
        """`inside`: this process's place in a replica of several."""
        weights, device = job.arena.weights(slot, 0), job.device(slot)
        self._summed = self._vector = job.arena.gradient(slot, 0)  # float32 [length], as the weights
        if device.type == "cuda":
            pin(weights)
            pin(self._summed)
            self._vector = torch.zeros_like(self._summed, device=device)
        self.backward = Backward(job.task, job.layout, [weights], job.plan.seed, device, inside)
        self._views = self.backward.layout.views(self._vector)

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case Compute():
                return self._compute(effect)
            case Keep():
                self._keep(effect)
            case UseWeights(buffer):
                self.backward.on_vector.use(buffer)
            case End():
                self.backward.batches.close()
            case _:
                raise AssertionError(f"a replica cannot {effect!r}")
        return None

    def _compute(self, effect: Compute) -> GradientComputed:
        """Gradient of one portion, left where autograd made it."""
        started = time.perf_counter()
        loss = self.backward.differentiate(self.backward.load(effect))
        finite = self.backward.finish() and math.isfinite(loss)
        finite = finite and all_finite([gradient for gradient in self.backward.gradients() if gradient is not None])
        return GradientComputed(loss, finite, time.perf_counter() - started)

    def _keep(self, effect: Keep) -> None:
        """The gradient computed last counts."""
        if not effect.accumulate:
            torch._foreach_zero_(self._views)  # nothing else is ever written there
        pairs = [(v, gradient) for v, gradient in zip(self._views, self.backward.gradients()) if gradient is not None]
        torch._foreach_add_([view for view, _ in pairs], [g for _, g in pairs], alpha=effect.weight)
        if self._vector is not self._summed:
            self._summed.copy_(self._vector, non_blocking=True)
            torch.cuda.current_stream(self.backward.device).synchronize()
