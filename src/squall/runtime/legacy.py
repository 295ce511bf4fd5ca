"""What a shard leaves to its successor, in memory that all processes of its machine inherit: journal, numbers, copy.

The numbers are the optimizer's state; the weights lie in shared memory anyway (`Job.initial`). Two counters, before and
behind an update, tell whether somebody has died over one. Then the numbers are torn, and there is a copy from before.
One is enough: who dies while making it has not died over an update, so the numbers themselves are whole.

    header   int64 updates begun, int64 updates made, int64 what is missing is elsewhere (0: nothing)
    names    int64 size, then name, dtype, shape and place of each tensor, as JSON
    tensors  each at a multiple of 64 bytes
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

from squall.runtime.journal import Journal

NAMES_BYTES = 1 << 16
VECTORS_AT_MOST = 8  # float32 for each element, of an optimizer's state; pages that nobody has touched are none
_ALIGNED = 64
_Place = tuple[str, str, tuple[int, ...], int]  # of a tensor
_UNRESERVED = 0x4000  # MAP_NORESERVE, which the module `mmap` does not name


def shared_memory(size: int) -> mmap.mmap:
    """Zeros, which take no room before they are written to."""
    return mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _UNRESERVED)


class Legacy:
    def __init__(self, elements: int, vectors: int = 0, fetched: int = 0, apart: bool = False) -> None:
        """`vectors`: bytes of those of L-BFGS, which has no numbers. `fetched`: slots, if it keeps what they have.

        `apart`: weights of its own, of a backup on the shard's own machine. It is said by who makes it.
        """
        self.backed = False  # by a backup, and taken over from it
        self.weights = torch.frombuffer(shared_memory(4 * elements), dtype=torch.float32) if apart else None
        self.journal = Journal(shared_memory(Journal.size()))
        self.numbers = Numbers(shared_memory(NAMES_BYTES + 4 * VECTORS_AT_MOST * elements + NAMES_BYTES))
        self.copy = Copy(self.numbers, elements)
        self.vectors = shared_memory(vectors) if vectors else None
        self.fetched: Tensor | None = None  # float32 [slots, elements]
        if fetched:
            whole = torch.frombuffer(shared_memory(4 * fetched * elements), dtype=torch.float32)
            self.fetched = whole.view(fetched, elements)


class Numbers:
    """Tensors by name."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._counts = memoryview(memory).cast("q")
        self._held: dict[str, Tensor] = {}
        self._places: list[_Place] = []
        self._free = NAMES_BYTES

    def begin(self) -> None:
        """An update."""
        self._counts[0] += 1

    def made(self) -> None:
        self._counts[1] = self._counts[0]

    @property
    def updates(self) -> int:
        return self._counts[1]

    @property
    def torn(self) -> bool:
        """Somebody has died over an update."""
        return self._counts[0] != self._counts[1]

    @property
    def lacking(self) -> bool:
        """Something could not be held."""
        return self._counts[2] != 0

    def holds(self, name: str, value: Tensor) -> bool:
        return self._held.get(name) is value

    def hold(self, name: str, value: object) -> Tensor | None:
        """The tensor, moved here; None where that cannot be."""
        if not isinstance(value, Tensor) or value.is_sparse or value.device.type != "cpu":
            self._counts[2] = 1
            return None
        own = self._held.get(name)
        if own is None or (own.dtype, own.shape) != (value.dtype, value.shape):
            size = value.numel() * value.element_size()
            place = self._free
            entry = name, str(value.dtype).removeprefix("torch."), tuple(value.shape), place
            names = msgspec.json.encode([*self._places, entry])
            if place + size > len(self._memory) or 32 + len(names) > NAMES_BYTES:
                self._counts[2] = 1
                return None
            self._free = place + -(-size // _ALIGNED) * _ALIGNED
            self._places.append(entry)
            self._memory[32 : 32 + len(names)] = names
            self._counts[3] = len(names)
            own = self._held[name] = self._tensor(*entry[1:])
        own.copy_(value)
        return own

    def taken_over(self) -> dict[str, Tensor]:
        """By a process that did not put them here."""
        names = self._memory[32 : 32 + self._counts[3]] or b"[]"
        self._places = msgspec.json.decode(names, type=list[_Place])  # another machine may have written them
        self._held = {name: self._tensor(kind, shape, place) for name, kind, shape, place in self._places}
        self._free = max(self._ends(), default=NAMES_BYTES)
        return dict(self._held)

    @property
    def size(self) -> int:
        return len(self._bytes)

    def begin_behind(self, updates: int) -> None:
        """Another one has made so many, whose tensors are still to come."""
        self._counts[0] = self._counts[1] = updates

    def copy_to(self, there: Tensor) -> int:
        """There is as much room. Returns where what is held ends."""
        _copy(self._bytes, there, 32 + self._counts[3], self._free)
        return self._free

    def put_back(self, copy: Tensor, end: int) -> None:
        """They are as they were when they were copied, and torn no more. Updates go on counting."""
        _copy(copy, self._bytes, NAMES_BYTES, end)
        self._counts[0] = self._counts[1]

    def _ends(self) -> Iterator[int]:
        for tensor, (*_, place) in zip(self._held.values(), self._places):
            yield place + -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED

    def _tensor(self, kind: str, shape: tuple[int, ...], place: int) -> Tensor:
        dtype = getattr(torch, kind)
        assert isinstance(dtype, torch.dtype)
        count = int(torch.Size(shape).numel())
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=place).view(shape)


def _copy(one: Tensor, other: Tensor, names_end: int, end: int) -> None:
    """Names, with their size, and tensors."""
    for span in (slice(24, names_end), slice(NAMES_BYTES, end)):
        other[span].copy_(one[span])


class Copy:
    """Of weights and numbers, from between two updates. It counts as whole by one store behind it.

    header   int64 1 + updates in it (0: it is not whole), int64 where what the numbers hold ends
    weights  float32 [elements]
    state    as it lies in `Numbers`
    """

    def __init__(self, numbers: Numbers, elements: int) -> None:
        self._numbers = numbers
        behind = _ALIGNED + -(-4 * elements // _ALIGNED) * _ALIGNED
        memory = shared_memory(behind + numbers.size)
        self._words = memoryview(memory)[:_ALIGNED].cast("q")
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._weights = whole[_ALIGNED : _ALIGNED + 4 * elements].view(torch.float32)
        self._state = whole[behind:]

    @property
    def updates(self) -> int:
        """In it; -1: there is none."""
        return self._words[0] - 1

    def make(self, weights: Tensor) -> None:
        self._words[0] = 0
        self._weights.copy_(weights)
        self._words[1] = self._numbers.copy_to(self._state)
        self._words[0] = 1 + self._numbers.updates

    def put_back(self, weights: Tensor) -> None:
        weights.copy_(self._weights)
        self._numbers.put_back(self._state, self._words[1])
