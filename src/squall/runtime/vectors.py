"""A shard's vectors for Sandblaster: combined, multiplied, and the sum of what replicas push."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from squall.protocol.effects import AddPortions, CalculateVectors, Effect, End, Payload, WriteSnapshot
from squall.protocol.events import Event, VectorsCalculated
from squall.protocol.sandblaster.messages import Calculation, Combine
from squall.runtime.arena import Arena
from squall.runtime.driver import Host
from squall.runtime.job import Job
from squall.runtime.ranges import Elements
from squall.runtime.snapshot import Snapshots
from squall.strategies.work import BatchMethod
from squall.vector import Layout

BLOCK = 1 << 16  # elements: of 2 x 10 + 1 vectors, 5 MiB. Products of a block are added up in double precision.


class VectorStore:
    """Elements [start, stop) of every vector, float32. The names are those of `protocol.sandblaster.method`.

    Gradient and history are the rows of one matrix, so that a product with all of them is one operation. The history's
    slots are filled in turn, so the rows in use come first.
    """

    def __init__(self, layout: Layout, shard: int, shards: int, history: int, arena: Arena, initial: Tensor) -> None:
        self.start, self.stop = layout.shard_range(shard, shards)
        self.arena = arena
        size = self.stop - self.start
        self._basis = torch.zeros(2 * history + 1, size)
        names = ["gradient", *(f"{kind}{slot}" for slot in range(history) for kind in "sy")]
        self._row = {name: number for number, name in enumerate(names)}
        self._vectors: dict[str, Tensor] = dict(zip(names, self._basis))
        for name in ("weights", "trial"):
            self._vectors[name] = initial[self.start : self.stop].clone()
        for name in ("sum", "direction"):
            self._vectors[name] = torch.zeros(size)

    @property
    def weights(self) -> Tensor:
        return self._vectors["weights"]

    def calculate(self, asked: Calculation) -> tuple[float, ...]:
        """Combine, then multiply; [rows x columns, largest]."""
        for combine in asked.combine:
            self._combine(combine)
        if asked.opens is not None:
            self._vectors["sum"].zero_()
        products = self._products(asked.rows, asked.columns) if asked.rows else []
        return (*products, *(_largest(self._vectors[name]) for name in asked.largest))

    def _combine(self, combine: Combine) -> None:
        target, terms = self._vectors[combine.target], combine.terms
        if combine.target not in self._row and all(name in self._row for name, _ in terms):
            rows = self._used(name for name, _ in terms)
            weights = torch.zeros(len(rows))
            for name, value in terms:
                weights[self._row[name]] = value
            torch.mv(rows.t(), weights, out=target)
            return
        (name, value), *others = sorted(terms, key=lambda term: term[0] != combine.target)  # itself first
        torch.mul(self._vectors[name], value, out=target)
        for name, value in others:
            target.add_(self._vectors[name], alpha=value)

    def _products(self, rows: Sequence[str], columns: Sequence[str]) -> list[float]:
        """Row by row. Torch's products of few vectors by few read them as often as a product of each alone does."""
        whole = all(name in self._row for name in columns)  # then one product with the matrix has all of them
        basis = self._used(columns) if whole else self._basis[:0]
        order = [self._row[name] for name in columns] if whole else list(range(len(columns)))
        total = torch.zeros(len(rows), len(basis) or len(columns), dtype=torch.float64)
        for at in range(0, self.stop - self.start, BLOCK):
            part = slice(at, at + BLOCK)
            for products, name in zip(total, rows):
                left = self._vectors[name][part]
                if whole:
                    products += torch.mv(basis[:, part], left)
                else:
                    products += torch.stack([torch.dot(self._vectors[column][part], left) for column in columns])
        return total[:, order].flatten().tolist()

    def _used(self, names: Iterable[str]) -> Tensor:
        """The matrix down to the last of these rows."""
        return self._basis[: 1 + max(self._row[name] for name in names)]

    # ------------------------------------------------------------ replicas and snapshots

    def add(self, slot: int, buffer: int) -> None:
        """What a replica pushes comes on top of the sum."""
        self._vectors["sum"].add_(self.arena.gradient(slot, buffer)[self.start : self.stop])

    def deliver(self, slot: int, buffer: int, name: str, some: Elements) -> None:
        """Copy these elements of a vector into a replica's weights."""
        pairs = zip(some.of(self.arena.weights(slot, buffer)), some.of(self._vectors[name], self.start))
        for there, own in pairs:
            there.copy_(own)

    def state(self) -> dict[str, Tensor]:
        """What a snapshot needs: the accepted weights, the gradient there, and the history."""
        place = f"0:{self.start}:{self.stop}"
        return {"weights": self.weights, **{f"{place}:{name}": self._vectors[name] for name in self._row}}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """`tensors` are of the whole vector, as `Snapshots.restore` puts them together."""
        for name in ("weights", *self._row):
            found = tensors.get(name if name == "weights" else f"0:{name}")
            if found is not None:
                self._vectors[name].copy_(found[self.start : self.stop])
        self._vectors["trial"].copy_(self.weights)


def _largest(vector: Tensor) -> float:
    low, high = torch.aminmax(vector)
    return max(abs(low.item()), abs(high.item()))


class VectorHost(Host):
    """A store of vectors, and where its snapshots go."""

    def __init__(self, job: Job, index: int) -> None:
        method = job.recipe.work
        assert isinstance(method, BatchMethod)
        self._index = index
        self._shards = job.recipe.shards
        self._ranges = job.ranges
        history = method.rules.history
        self.store = VectorStore(job.layout, index, self._shards, history, job.arena, job.initial)
        self._snapshots = Snapshots(job.directory)
        if job.restored is not None:
            self.store.restore(job.restored.tensors)

    def attach(self, payload: Payload) -> None:
        self.store.deliver(payload.slot, payload.buffer, payload.kind, self._ranges(payload))

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case CalculateVectors(calculation):
                return VectorsCalculated(calculation.number, self.store.calculate(calculation))
            case AddPortions(owner, buffer):
                self.store.add(owner.index, buffer)
            case WriteSnapshot(number):
                return self._snapshots.write_shard(number, self._index, self._shards, self.store)
            case End():
                pass
            case _:
                raise AssertionError(f"a shard cannot {effect!r}")
        return None
