"""Fake hosts: no numbers, but the same buffers as in a real run, so that every applied gradient can be told.

A gradient buffer holds which batches were computed into it and on which versions; a weights buffer holds the versions
that the shards wrote. What a shard applies is read from the buffers at that moment, as in a real run, so a buffer that
is used too early shows as a gradient applied twice, or as weights written while they are computed on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from squall.protocol import core
from squall.protocol.core import Node, Note, Payload, PublishSnapshot

if TYPE_CHECKING:
    from sim_bench import Bench

COMPUTE_S = 0.01


Batch = tuple[int, int, int]  # epoch, start, stop


class Gradient(NamedTuple):
    """One computation of one batch."""

    number: int
    epoch: int
    start: int
    stop: int
    basis: tuple[int, ...]  # version of each shard


class Applied(NamedTuple):
    """One pushed buffer in one update of one shard."""

    gradients: tuple[Gradient, ...]
    staleness: int  # as measured: of the oldest gradient
    weight: float


class _Host:
    def __init__(self, bench: Bench, node: Node) -> None:
        self.bench, self.node = bench, node

    def attach(self, payload: Payload) -> None:
        pass

    def poll(self) -> None:
        return None

    def perform(self, effect: Any, now: float) -> Any:
        return None


class ReplicaHost(_Host):
    active = 0

    def perform(self, effect: Any, now: float) -> Any:
        bench, slot = self.bench, self.node.index
        match effect:
            case core.Compute(epoch, start, stop, buffer, accumulate):
                bench.computed += 1
                finite = not bench.poison(bench.computed, (epoch, start, stop))
                basis = tuple(bench.weights[slot, self.active])
                bench.in_use[slot] = (self.active, now + bench.compute_s(self.node))
                if not accumulate:
                    bench.gradients[slot, buffer] = []
                if finite:
                    bench.gradients[slot, buffer].append(Gradient(bench.computed, epoch, start, stop, basis))
                return core.GradientComputed(1.0, finite, bench.compute_s(self.node))
            case core.UseWeights(buffer):
                self.active = buffer
        return None


class ShardHost(_Host):
    def __init__(self, bench: Bench, node: Node) -> None:
        super().__init__(bench, node)
        self.applied: list[Applied] = []
        self.version = 0
        self.files: dict[int, list[Applied]] = {}  # snapshot -> what was applied before it

    def attach(self, payload: Payload) -> None:
        bench, slot = self.bench, payload.slot
        buffer, until = bench.in_use.get(slot, (-1, 0.0))
        assert buffer != payload.buffer or bench.world.now >= until, f"slot {slot}: weights written while in use"
        bench.weights[slot, payload.buffer][self.node.index] = self.version

    def perform(self, effect: Any, now: float) -> Any:
        match effect:
            case core.Apply(terms, _):
                assert [t.slot for t in terms] == sorted(t.slot for t in terms)
                for term in terms:
                    gradients = tuple(self.bench.gradients[term.slot, term.buffer])
                    oldest = min(gradient.basis[self.node.index] for gradient in gradients)
                    self.applied.append(Applied(gradients, self.version - oldest, term.weight))
                self.version += 1
            case core.WriteSnapshot(number):
                self.files[number] = list(self.applied)
                return core.SnapshotWritten(number, self.bench.disk(number))
        return None


class EvaluatorHost(_Host):
    def perform(self, effect: Any, now: float) -> Any:
        if isinstance(effect, core.EvaluateModel):
            self.bench.in_use[self.node.index] = (effect.buffer, now + COMPUTE_S)
            return core.ModelEvaluated(self.bench.metrics())
        return None


class CoordinatorHost(_Host):
    def perform(self, effect: Any, now: float) -> Any:
        match effect:
            case Note():
                self.bench.notes.append(effect)
            case PublishSnapshot():
                self.bench.published.append(effect)
        return None
