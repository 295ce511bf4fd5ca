"""The memory that the processes of one host share: each replica's weights and gradient buffers.

The arena is a file under /dev/shm with mode 0600 that has no name (O_TMPFILE), so that whatever dies, and however,
nothing stays behind. Processes get it by being forked from the one that made it.
Its pages are reserved at once: too small a /dev/shm is an answer here, not a SIGBUS later. Where a run has several
machines each has an arena with room for all slots, and reserves what is used there: a number has the same place on
every machine.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from squall.runtime.disk import LARGER, refusal

SHARED_MEMORY = Path("/dev/shm")
_PAGE = 4096
_PART = 1 << 18  # elements, 1 MiB: well inside a core's part of the cache


Span = tuple[int, int]  # bytes [start, stop)


@dataclass(frozen=True)
class Shape:
    """How many buffers of how many float32 elements.

    `replicas` slots have `weights` and `gradients` buffers each; the slot after them is the evaluator's, with one
    weights buffer. `groups` is the number of param groups, whose learning rates travel with the weights.
    """

    length: int
    replicas: int
    weights: int = 1
    gradients: int = 1
    groups: int = 1

    @property
    def stride(self) -> int:
        """Bytes from one buffer to the next."""
        return -(-4 * self.length // _PAGE) * _PAGE

    @property
    def rates_bytes(self) -> int:
        return 8 * self.groups * (self.replicas + 1) * self.weights

    @property
    def rates_span(self) -> Span:
        """Bytes behind the buffers."""
        start = (self.replicas * (self.weights + self.gradients) + 1) * self.stride
        return start, start + -(-self.rates_bytes // _PAGE) * _PAGE

    def spans(self, evaluated: bool) -> list[Span]:
        """What is used where all processes are on one machine."""
        return [(0, self.rates_span[0] - (0 if evaluated else self.stride))]

    @property
    def total_bytes(self) -> int:
        return self.rates_span[1]

    def buffers(self, slot: int) -> Iterator[int]:
        """The first byte of each buffer of a slot."""
        number = self.weights + self.gradients
        for index in range(slot * number, slot * number + (number if slot < self.replicas else 1)):
            yield index * self.stride


class Arena:
    """Buffers by slot and number; the same memory in every process that inherits it."""

    def __init__(self, shape: Shape, memory: mmap.mmap, handle: int | None = None) -> None:
        """`handle` is the descriptor of the file behind it, which is closed with the arena."""
        self.shape = shape
        self.memory = memory
        self._handle = handle
        if handle is not None:
            weakref.finalize(self, os.close, handle)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._floats = whole.view(torch.float32)
        rates = whole[shape.rates_span[0] :][: shape.rates_bytes]
        self._rates = rates.view(torch.float64).view(shape.replicas + 1, shape.weights, shape.groups)

    @classmethod
    def create(
        cls, shape: Shape, fallback: Path, directory: Path = SHARED_MEMORY, used: Sequence[Span] | None = None
    ) -> Arena:  # fmt: skip
        """Reserve an arena in `directory`, or in `fallback` (on disk, slower) with a warning that says why.

        `used`: what will be used of it; None: all.
        """
        spans = [(0, shape.total_bytes)] if used is None else [*used, shape.rates_span]
        size = sum(stop - start for start, stop in spans)
        try:
            return cls(shape, *_reserve(directory, shape.total_bytes, spans))
        except OSError as error:
            refused = f"{directory} cannot hold the arena of {_mib(size)} ({error.strerror})"
        try:
            arena = cls(shape, *_reserve(fallback, shape.total_bytes, spans))
        except OSError as error:
            raise OSError(f"{refused}: {LARGER}; and a file under {refusal(fallback, error)}") from error
        warnings.warn(
            f"{refused}; it is put into a file under {fallback}, which is slower: {LARGER}",
            RuntimeWarning,
            stacklevel=2,
        )
        return arena

    @classmethod
    def private(cls, shape: Shape) -> Arena:
        """An arena that only this process uses."""
        return cls(shape, mmap.mmap(-1, shape.total_bytes))

    def reserve(self, slot: int) -> None:
        """Who was on another machine will use this slot here. Raises `OSError` where it has no room."""
        if self._handle is not None:
            for start in self.shape.buffers(slot):
                os.posix_fallocate(self._handle, start, self.shape.stride)

    def reserve_range(self, start: int, stop: int, slots: int) -> None:
        """A shard may come to this machine that has these elements of all slots. Raises as `reserve`."""
        if self._handle is not None:
            for at in (at for slot in range(slots) for at in self.shape.buffers(slot)):
                os.posix_fallocate(self._handle, at + 4 * start, 4 * (stop - start))

    def weights(self, slot: int, buffer: int) -> Tensor:
        """float32 [length]."""
        return self._buffer(slot, buffer)

    def gradient(self, slot: int, buffer: int) -> Tensor:
        """float32 [length]."""
        return self._buffer(slot, self.shape.weights + buffer)

    def rates(self, slot: int, buffer: int) -> Tensor:
        """Learning rates that go with a weights buffer: float64 [groups]."""
        return self._rates[slot, buffer]

    def _buffer(self, slot: int, number: int) -> Tensor:
        index = slot * (self.shape.weights + self.shape.gradients) + number
        start = index * self.shape.stride // 4
        return self._floats[start : start + self.shape.length]


def newest_first(vector: Tensor) -> tuple[Tensor, ...]:
    """Parts of a vector, the last first: what has just been written from start to end is cached at its end."""
    parts: tuple[Tensor, ...] = vector.split(_PART)
    return parts[::-1]


def _reserve(directory: Path, size: int, spans: Sequence[Span]) -> tuple[mmap.mmap, int]:
    free = os.statvfs(directory)
    if free.f_bavail * free.f_frsize < sum(stop - start for start, stop in spans):
        raise OSError(28, f"{_mib(free.f_bavail * free.f_frsize)} free")
    with tempfile.TemporaryFile(buffering=0, prefix="squall-", dir=directory) as file:  # mode 0600
        handle = os.dup(file.fileno())
    try:
        os.truncate(handle, size)
        for start, stop in spans:
            if start < stop:  # replicas without shards have no buffers here
                os.posix_fallocate(handle, start, stop - start)
        return mmap.mmap(handle, size), handle
    except BaseException:
        os.close(handle)
        raise


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
