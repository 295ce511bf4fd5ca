"""A replica with an optimizer of its own: it trains on its own weights, and meets the shards now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from squall.protocol.effects import Compute
from squall.protocol.events import GradientComputed
from squall.protocol.messages import Factors
from squall.runtime.backward import Backward
from squall.runtime.compute import all_finite
from squall.runtime.inside import local as inner
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
        task, layout, local = backward.task, backward.layout, recipe.loop.local  # of a part, its own pieces
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
        here = {id(parameter): parameter for parameter in backward.parameters}
        # Fused optimizers take no DTensors, and read memory in one piece: slices are stepped beside their place.
        self._slices = [(p, nn.Parameter(inner(p).clone())) for p in backward.parameters if inner(p) is not p]
        here |= {id(parameter): beside for parameter, beside in self._slices}
        groups = [{**g, "params": [here[id(p)] for p in g["params"] if id(p) in here]} for g in task.param_groups()]
        self._optimizer = build_optimizer(local.optimizer, groups)
        self.schedule = Schedule(task, self._optimizer) if task.schedule is not None else None
        self._step = bare_step(self._optimizer, tracked=True)
        self._batches_per_epoch = -(-task.examples // task.batch_size)
        self._batch_size = task.batch_size

    def use(self, buffer: int) -> None:
        """Move towards the weights just fetched, or take them."""
        if self._begun and self._local.pull != 1:
            fetched = self._fetched.to(self._own.device, non_blocking=True)
            self._layout.write_buffers(self.backward.on_vector.model, self._own)
            for own, theirs in self._pairs(self._own, fetched, "parameters", "buffers"):
                own.lerp_(theirs, self._local.pull)
            for own, theirs in self._pairs(self._own, fetched, "counters"):
                own.copy_(theirs)
        else:
            for own, theirs in self._pairs(self._own, self._fetched):
                own.copy_(theirs, non_blocking=True)
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
        finite = finite and all_finite([gradient for gradient in self.backward.gradients() if gradient is not None])
        if finite:
            self._advance(effect)
            with rates_scaled(self._optimizer, 1.0, factors), torch.no_grad():
                for parameter, beside in self._slices:
                    beside.copy_(inner(parameter))
                    beside.grad = inner(parameter.grad)
                self._step()
                for parameter, beside in self._slices:
                    inner(parameter).copy_(beside)
            self._layout.write_buffers(self.backward.on_vector.model, self._own)
            stepped = sum(own.sum().item() for own in self._layout.regions(self._own, "parameters"))
            finite = math.isfinite(self.backward.inside.agreed(stepped))  # a step may overflow
        else:
            self.backward.on_vector.use(0)  # the forward pass may have put a NaN into BatchNorm's statistics
        loss, extras = math.nan if loss is None else loss, self.backward.extras
        spoilt, seconds = not finite and self.backward.spoilt, time.perf_counter() - started
        return GradientComputed(loss, finite, seconds, extras=extras, spoilt=spoilt)

    def prepare_push(self) -> None:
        """Floating buffers are pushed as they are, counters by what was added, whatever parameters are pushed as."""
        for pushed, own in self._pairs(self._pushed, self._own):
            pushed.copy_(own, non_blocking=True)
        if self._own.device.type == "cuda":
            torch.cuda.current_stream(self._own.device).synchronize()
        if self._local.pushes == "delta":
            for fetched, pushed in self._pairs(self._fetched, self._pushed, "parameters"):
                torch.sub(fetched, pushed, out=pushed)
        for pushed, before in zip(self._layout.counter_views(self._pushed), self._counted):
            put_count(pushed, count_in(pushed) - before)

    def _pairs(self, one: Tensor, other: Tensor, *kinds: str) -> Iterable[tuple[Tensor, Tensor]]:
        return zip(self._layout.regions(one, *kinds), self._layout.regions(other, *kinds))

    def _advance(self, effect: Compute) -> None:
        """Bring the schedule to the batch's place in the run, so that a replacement process has the right rate."""
        if self.schedule is not None:
            batch = effect.epoch * self._batches_per_epoch + effect.start // self._batch_size
            self.schedule.advance(batch // self._replicas)
