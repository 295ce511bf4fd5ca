"""A replica with an optimizer of its own: it trains on its own weights, and meets the shards now and then."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from squall.protocol.effects import Compute
from squall.protocol.events import GradientComputed
from squall.protocol.messages import Factors
from squall.runtime.backward import Backward
from squall.runtime.compute import all_finite
from squall.runtime.optimizers import bare_step, build_optimizer, rates_scaled
from squall.runtime.rates import Schedule
from squall.strategies import Recipe
from squall.vector import count_in, put_count


class LocalTraining:
    """Steps its own optimizer on every batch; `prepare_push` and `use` are the two halves of an exchange.

    Shards write into `fetched` and read from `pushed`, both float32 [length] in the arena. Between exchanges `fetched`
    stays what the last fetch brought, so it is also what a delta counts from.
    """

    def __init__(self, backward: Backward, own: Tensor, recipe: Recipe, fetched: Tensor, pushed: Tensor) -> None:
        """`own` is the weights buffer of `backward`, float32 [length]."""
        task, layout, local = backward.task, backward.layout, recipe.loop.local
        assert local is not None
        self._local = local
        self._replicas = recipe.replicas
        self._layout = layout
        self._fetched = fetched
        self._pushed = pushed
        self._own = own
        self.backward = backward
        self.batches = backward.batches
        self._begun = False  # there are weights of its own
        self._counted: list[Tensor] = []  # counters, as the last fetch left them
        layout.write_buffers(task.model, self._own)
        self.backward.on_vector.use(0)
        self._optimizer = build_optimizer(local.optimizer, task.param_groups())
        self.schedule = Schedule(task, self._optimizer) if task.schedule is not None else None
        self._step = bare_step(self._optimizer, tracked=True)
        self._batches_per_epoch = -(-task.examples // task.batch_size)
        self._batch_size = task.batch_size

    def use(self, buffer: int) -> None:
        """Move towards the weights just fetched, or take them."""
        if self._begun and self._local.pull != 1:
            fetched, averaged = self._fetched.to(self._own.device, non_blocking=True), self._layout.counted
            self._layout.write_buffers(self.backward.on_vector.model, self._own)
            self._own[:averaged].lerp_(fetched[:averaged], self._local.pull)
            self._own[averaged:].copy_(fetched[averaged:])
        else:
            self._own.copy_(self._fetched, non_blocking=True)
        self._begun = True
        self.backward.on_vector.use(0)
        self._counted = [counter.double() for counter in self._layout.counters_of(self.backward.on_vector.model)]

    def compute(self, effect: Compute) -> GradientComputed:
        """One step of the replica's own optimizer; a gradient that is not finite changes nothing."""
        started = time.perf_counter()
        loss = self.backward.differentiate(self.backward.load(effect))
        return self.accept(effect, loss, started)

    def accept(
        self, effect: Compute, loss: float | None, started: float, factors: Factors = (), over: bool = True
    ) -> GradientComputed:  # fmt: skip
        """Step on the fresh gradients of the batch that the effect names; its loss may not be known."""
        finite = self.backward.finish() and (loss is None or math.isfinite(loss))
        finite = finite and all_finite([p.grad for p in self.backward.on_vector.parameters if p.grad is not None])
        if finite:
            self._advance(effect)
            with rates_scaled(self._optimizer, 1.0, factors):
                self._step()
            self._layout.write_buffers(self.backward.on_vector.model, self._own)
            finite = math.isfinite(self._own[: self._layout.tail].sum().item())  # a step may overflow
        else:
            self.backward.on_vector.use(0)  # the forward pass may have put a NaN into BatchNorm's statistics
        loss, extras = math.nan if loss is None else loss, self.backward.extras
        return GradientComputed(loss, finite, time.perf_counter() - started, extras=extras)

    def prepare_push(self) -> None:
        """Floating buffers are pushed as they are, counters by what was added, whatever parameters are pushed as."""
        self._pushed.copy_(self._own, non_blocking=True)
        if self._own.device.type == "cuda":
            torch.cuda.current_stream(self._own.device).synchronize()
        if self._local.pushes == "delta":
            parameters = slice(0, self._layout.tail)
            torch.sub(self._fetched[parameters], self._pushed[parameters], out=self._pushed[parameters])
        for pushed, before in zip(self._layout.counter_views(self._pushed), self._counted):
            put_count(pushed, count_in(pushed) - before)

    def _advance(self, effect: Compute) -> None:
        """Bring the schedule to the batch's place in the run, so that a replacement process has the right rate."""
        if self.schedule is not None:
            batch = effect.epoch * self._batches_per_epoch + effect.start // self._batch_size
            self.schedule.advance(batch // self._replicas)
