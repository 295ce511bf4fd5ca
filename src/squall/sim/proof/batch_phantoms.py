"""Hosts for Sandblaster's machines: vectors of two numbers on each shard, and a loss whose minimum is known.

The loss of an example x is sum_j a_j (w_j - x_j)^2 / 2, so the mean over the examples is least at their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from squall.protocol import effects, events
from squall.protocol.effects import Effect, Payload
from squall.protocol.events import Event
from squall.protocol.nodes import Node
from squall.protocol.sandblaster.messages import Calculation, Combine
from squall.runtime.vectors import Changes
from squall.sim.proof.memory import File, Gradient, Memory, Written, folded_with
from squall.sim.proof.phantom_hosts import PhantomHosts
from squall.sim.proof.phantoms import Phantom, ShardPhantom
from squall.strategies.base import Recipe

WIDTH = 2  # elements of a shard
TORN = (math.nan,) * WIDTH

Vector = tuple[float, ...]


class KeptPortion(NamedTuple):
    """A portion's gradient in a gradient buffer."""

    gradient: Gradient  # its basis: the calculations that each shard had carried out
    weight: float
    vector: Vector  # [WIDTH x shards], weighted


def example(number: int, element: int) -> float:
    return (number * 7 + element * 5) % 11 / 11 - 0.4


def steepness(element: int) -> float:
    return 1.0 + 3.0 * element


class BatchMemory(Memory):
    """With the vectors of a run of Sandblaster. A slot has one buffer of each."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        slots = range(recipe.replicas + 1)
        self.trial: dict[int, list[Vector]] = {slot: [(0.0,) * WIDTH] * recipe.shards for slot in slots}
        self.kept: dict[int, list[KeptPortion]] = {slot: [] for slot in slots}

    def _read(self, payload: Payload) -> object:
        if payload.kind == "gradient":
            return super()._read(payload)
        return super()._read(payload), self.trial[payload.slot][payload.shard]

    def _pushed(self, slot: int, buffer: int) -> tuple[Any, ...]:
        return tuple(self.kept[slot])

    def _write(self, payload: Payload, numbers: Any) -> None:
        if payload.kind == "gradient":
            self.kept[payload.slot] = list(numbers)
        else:
            written, self.trial[payload.slot][payload.shard] = numbers
            super()._write(payload, written)

    def spoil(self, payload: Payload, numbers: Any) -> None:
        written, _ = numbers
        self.write(payload, (Written(-1, written.fold), (0.0,) * WIDTH))


class BatchPhantomHosts(PhantomHosts):
    """Of a run of Sandblaster."""

    memories: dict[Node, BatchMemory]  # type: ignore[assignment]
    shards: list[VectorPhantom]  # type: ignore[assignment]

    def new_memory(self) -> BatchMemory:
        return BatchMemory(self.recipe)

    def make(self, node: Node, version: int, file: File | None) -> Phantom:
        match node.role:
            case "shard":
                return VectorPhantom(self, node, file)
            case "replica":
                return PortionPhantom(self, node)
        return super().make(node, version, file)


class PortionPhantom(Phantom):
    hosts: BatchPhantomHosts
    memory: BatchMemory

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case effects.Compute(epoch, start, stop):
                return self._compute(epoch, start, stop)
            case effects.Keep(_, weight, accumulate):
                gradient, vector = self._last
                kept = KeptPortion(gradient, weight, tuple(weight * value for value in vector))
                before = self.memory.kept[self.node.index] if accumulate else ()
                self.memory.kept[self.node.index] = [*before, kept]
        return None

    def _compute(self, epoch: int, start: int, stop: int) -> Event:
        hosts, slot = self.hosts, self.node.index
        hosts.computed += 1
        finite = not hosts.poison(hosts.computed, (epoch, start, stop))
        seconds = hosts.compute_s(self.node)
        self.memory.in_use[slot] = (0, hosts.now() + seconds)
        weights = [value for of_shard in self.memory.trial[slot] for value in of_shard]
        away = [[w - example(i, j) for j, w in enumerate(weights)] for i in range(start, stop)]
        loss = sum(steepness(j) * d * d / 2 for of in away for j, d in enumerate(of)) / (stop - start)
        vector = tuple(sum(steepness(j) * of[j] for of in away) / (stop - start) for j in range(len(weights)))
        basis = tuple(written.version for written in self.memory.weights[slot, 0])
        self._last = Gradient(hosts.computed, epoch, start, stop, basis), vector
        return events.GradientComputed(loss if finite else float("nan"), finite, seconds)


class VectorPhantom(ShardPhantom):
    """A shard's vectors. `version` is the last calculation; `fold` is of calculations and pushes."""

    pieces = ()
    memory: BatchMemory

    def __init__(self, hosts: BatchPhantomHosts, node: Node, file: File | None) -> None:
        super().__init__(hosts, node, 0, file)
        names = ("weights", "trial", "sum0", "sum1", "direction")
        self.vectors = dict.fromkeys(names, (0.0,) * WIDTH) | dict(file.vectors if file else {})
        self._changes = Changes(bytearray(16))

    def _name(self, vector: str) -> str:
        return f"sum{self._changes.added % 2}" if vector == "sum" else vector

    def vector(self, name: str) -> Vector:
        return self.vectors[self._name(name)]

    def torn(self, inside: Effect) -> int | None:
        """Some of its changes are made, and the next vector is no number."""
        match inside:
            case effects.CalculateVectors(calculation):
                for place, change in enumerate(self._changes.left(calculation)):
                    if place == calculation.number % (len(calculation.combine) + 1):
                        self.vectors[self._name("sum" if change is None else change.target)] = TORN
                        break
                    self._change(change)
            case effects.AddPortions(number=number) if number > self._changes.added:
                self.vectors[f"sum{number % 2}"] = TORN
        return None

    @property
    def point(self) -> tuple[int, int]:
        return self.version, self._changes.added

    def whole(self, waiting: Sequence[Payload] = ()) -> Any:
        return self.version, self.fold, dict(self.vectors), self._changes.told, self._pushes(waiting)

    def take_whole(self, whole: Any) -> None:
        self.version, self.fold, vectors, told, pushes = whole
        self._lay(pushes)
        self.vectors, self._changes = dict(vectors), Changes(bytearray(told))

    def numbers(self, payload: Payload) -> object:
        return super().numbers(payload), self.vectors[payload.kind]

    def file(self) -> File:
        kept = {name: vector for name, vector in self.vectors.items() if name not in ("trial", "sum0", "sum1")}
        return File(self.fold, vectors=kept)

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case effects.CalculateVectors(calculation):
                return events.VectorsCalculated(calculation.number, self._calculate(calculation))
            case effects.AddPortions(owner, buffer, _, number):
                if number > self._changes.added:
                    self._add(self.memory.gradient(owner.index, buffer, self.node.index, self.hosts.others(owner)))
                return None
        return super().perform(effect, now)

    def _add(self, portions: Sequence[KeptPortion]) -> None:
        total = added(self.vector("sum"), portions, self.node.index)
        self._changes.add()
        self.vectors[self._name("sum")] = total
        self.fold = folded_with(self.fold, entry_of(portions))

    def _calculate(self, asked: Calculation) -> tuple[float, ...]:
        for change in self._changes.left(asked):
            self._change(change)
        if asked.number > self.version:
            self.version, self.fold = asked.number, folded_with(self.fold, (asked.number,))
        dots = [
            sum(a * b for a, b in zip(self.vector(row), self.vector(column)))
            for row in asked.rows
            for column in asked.columns
        ]
        return (*dots, *(max(map(abs, self.vector(name))) for name in asked.largest))

    def _change(self, change: Combine | None) -> None:
        if change is None:
            self.vectors[self._name("sum")] = (0.0,) * WIDTH
            return
        self.vectors[change.target] = combined(change, self.vector)


def added(total: Vector, portions: Sequence[KeptPortion], shard: int) -> Vector:
    for kept in portions:
        total = tuple(value + kept.vector[WIDTH * shard + i] for i, value in enumerate(total))
    return total


def combined(combine: Combine, vector: Callable[[str], Vector]) -> Vector:
    terms = [(value, vector(name)) for name, value in combine.terms]
    return tuple(sum(value * there[i] for value, there in terms) for i in range(WIDTH))


def entry_of(portions: Sequence[KeptPortion]) -> tuple[float, ...]:
    """What stands for a push in a fold."""
    return tuple(value for kept in portions for value in (kept.gradient.number, kept.weight))
