"""A shard's vectors for Sandblaster: combined, multiplied, and the sum of what replicas push.

They lie in memory that outlives the process. Every change writes a vector that it does not read, and leaves a mark when
it is made. So of a process that is killed one change at most is torn, and its successor makes that again from what the
dead one had. Products change nothing, and are formed again.

    changes  two int64 (`Changes`)
    vectors  float32 [rows, elements], each at a multiple of 64 bytes: gradient, history, weights, trial, direction, and
             two sums, which take turns: a push is added to one of them, into the other
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from mmap import mmap

import torch
from torch import Tensor

from squall.protocol.copied import CopyTo
from squall.protocol.effects import AddPortions, CalculateVectors, Effect, End, Payload, WriteSnapshot
from squall.protocol.events import CopyKnown, Event, VectorsCalculated
from squall.protocol.nodes import Node
from squall.protocol.sandblaster.messages import Calculation, Combine
from squall.runtime import whole
from squall.runtime.arena import Arena
from squall.runtime.driver import Host
from squall.runtime.job import Job
from squall.runtime.legacy import shared_memory
from squall.runtime.ranges import Elements
from squall.runtime.snapshot import Snapshots
from squall.strategies.work import BatchMethod
from squall.vector import Layout

BLOCK = 1 << 16  # elements: of 2 x 10 + 1 vectors, 5 MiB. Products of a block are added up in double precision.

ALONE = ("weights", "trial", "direction")  # the vectors that are not rows of the matrix, but for the sums
_ALIGNED = 16  # elements, or 64 bytes


def vectors_bytes(elements: int, history: int) -> int:
    """Of the memory of a shard's vectors."""
    return 4 * _ALIGNED + 4 * _rows(history) * _padded(elements)


def _rows(history: int) -> int:
    return 2 * history + 1 + len(ALONE) + 2


def _padded(elements: int) -> int:
    return -(-elements // _ALIGNED) * _ALIGNED


class Changes:
    """Which changes of a shard's vectors are made. What is asked for again has those left that are not.

    calculation  int64 number << 8 | how many of its changes are made
    added        int64 pushes that are in sums; the newest sum is that of this number, modulo two
    """

    def __init__(self, memory: mmap | bytearray) -> None:
        """Zeros at first."""
        self._words = memoryview(memory)[:16].cast("q")

    @property
    def told(self) -> bytes:
        """What another one of these begins with."""
        return self._words.tobytes()

    def left(self, asked: Calculation) -> Iterator[Combine | None]:
        """Changes that are to be made, in turn; None: the sum becomes zero. Each is made when the next is asked for."""
        number, made = divmod(self._words[0], 256)
        if number > asked.number:
            return
        opening = () if asked.opens is None else (None,)
        for place, change in enumerate((*asked.combine, *opening)):
            if number < asked.number or place >= made:
                yield change
                self._words[0] = asked.number << 8 | place + 1

    @property
    def added(self) -> int:
        return self._words[1]

    def add(self) -> None:
        """One more push is in the other sum, with all that was in this one."""
        self._words[1] += 1


class VectorStore:
    """Elements [start, stop) of every vector, float32. The names are those of `protocol.sandblaster.method`.

    Gradient and history are the rows of one matrix, so that a product with all of them is one operation. The history's
    slots are filled in turn, so the rows in use come first.
    """

    def __init__(
        self, layout: Layout, shard: int, shards: int, history: int, arena: Arena, memory: mmap | None = None
    ) -> None:  # fmt: skip
        """`memory`: of `vectors_bytes`, where another process may have had its vectors; zeros at first."""
        self.start, self.stop = layout.shard_range(shard, shards)
        self.arena = arena
        size = self.stop - self.start
        if memory is None:
            memory = shared_memory(vectors_bytes(size, history))
        self.image = torch.frombuffer(memory, dtype=torch.uint8)  # all that there is
        self._changes = Changes(memory)
        room = torch.frombuffer(memory, dtype=torch.float32)[_ALIGNED:]
        vectors = room[: _rows(history) * _padded(size)].view(_rows(history), _padded(size))[:, :size]
        names = ["gradient", *(f"{kind}{slot}" for slot in range(history) for kind in "sy")]
        self._row = {name: number for number, name in enumerate(names)}
        self._basis, self._sums = vectors[: len(names)], vectors[-2:]
        self._vectors: dict[str, Tensor] = dict(zip([*names, *ALONE], vectors))
        self._vectors["sum"] = self._sums[self._changes.added % 2]

    def begin(self, initial: Tensor) -> None:
        """Nobody had vectors here before."""
        for name in ("weights", "trial"):
            self._vectors[name].copy_(initial[self.start : self.stop])

    @property
    def weights(self) -> Tensor:
        return self._vectors["weights"]

    def calculate(self, asked: Calculation) -> tuple[float, ...]:
        """Combine, then multiply; [rows x columns, largest]."""
        for change in self._changes.left(asked):
            if change is None:
                self._vectors["sum"].zero_()
            else:
                self._combine(change)
        products = self._products(asked.rows, asked.columns) if asked.rows else []
        return (*products, *(_largest(self._vectors[name]) for name in asked.largest))

    def _combine(self, combine: Combine) -> None:
        target, terms = self._vectors[combine.target], combine.terms
        assert all(name != combine.target for name, _ in terms), "nobody could make it again"
        if combine.target not in self._row and all(name in self._row for name, _ in terms):
            rows = self._used(name for name, _ in terms)
            weights = torch.zeros(len(rows))
            for name, value in terms:
                weights[self._row[name]] = value
            torch.mv(rows.t(), weights, out=target)
            return
        (name, value), *others = terms
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

    def add(self, slot: int, buffer: int, number: int) -> None:
        """What a replica pushes comes on top of the sum, unless this was added already."""
        if number > self._changes.added:
            pushed, other = self.arena.gradient(slot, buffer)[self.start : self.stop], self._sums[number % 2]
            torch.add(self._vectors["sum"], pushed, out=other)
            self._changes.add()
            self._vectors["sum"] = other

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

    def __init__(self, job: Job, index: int, copied: bool = False) -> None:
        """`copied`: another one's vectors are there."""
        method = job.recipe.work
        assert isinstance(method, BatchMethod)
        self._index = index
        self._shards = job.recipe.shards
        self._ranges = job.ranges
        history, legacy = method.rules.history, job.legacies.get(index)
        memory = None if legacy is None else legacy.vectors
        self.store = VectorStore(job.layout, index, self._shards, history, job.arena, memory)
        self._snapshots, self._scratch = Snapshots(job.directory), job.scratch
        if not copied and not job.succeeds(Node("shard", index)):
            self.store.begin(job.initial)
            if job.restored is not None:
                self.store.restore(job.restored.tensors)

    @classmethod
    def of_copy(cls, job: Job, index: int, found: whole.Whole) -> VectorHost:
        """Of a backup, to which a shard has given this."""
        legacy = job.legacies[index]
        memory = legacy.vectors
        assert memory is not None
        torch.frombuffer(memory, dtype=torch.uint8).copy_(found.tensors["vectors"])
        if legacy.weights is None:
            found.lay(job.arena, job.ranges, index)
        return cls(job, index, copied=True)

    def attach(self, payload: Payload) -> None:
        if payload.kind in ("weights", "trial"):  # what goes to a backup lies where it is read
            self.store.deliver(payload.slot, payload.buffer, payload.kind, self._ranges(payload))

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case CalculateVectors(calculation):
                return VectorsCalculated(calculation.number, self.store.calculate(calculation))
            case AddPortions(owner, buffer, _, number):
                self.store.add(owner.index, buffer, number)
            case CopyTo(Node() as backup, _, _, state, waiting, number):
                pushes = whole.of_pushes(self.store.arena, self._ranges, waiting)
                return self._pack(backup, number, {**whole.of_machine(state), **pushes})
            case CopyTo():
                pass
            case WriteSnapshot(number):
                return self._snapshots.write_shard(number, self._index, self._shards, self.store)
            case End():
                pass
            case _:
                raise AssertionError(f"a shard cannot {effect!r}")
        return None

    def _pack(self, backup: Node, number: int, tensors: dict[str, Tensor]) -> CopyKnown:
        assert self._scratch is not None
        store = self.store
        most = whole.bytes_at_most(store.stop - store.start, store.arena.shape)
        return whole.packed(self._scratch, backup, number, {**tensors, "vectors": store.image}, most)
