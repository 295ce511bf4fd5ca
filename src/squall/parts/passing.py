"""What parts with no memory in common pass to each other: what each has of the vector, and the numbers themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from squall.parts.neighbours import NeighbourLost, Neighbours
from squall.runtime.inside import Inside
from squall.vector import Layout, Slice

MOST_BYTES = 1 << 26  # that a part says of its share: a name takes some dozens
T = TypeVar("T")


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What a part has of the vector, by the names of tensors."""

    reads: list[str]
    writes: list[str]
    slices: dict[str, Slice]

    @classmethod
    def of(cls, place: Inside) -> Share:
        return cls(_names(place.reads), _names(place.writes), place.reads.slices)

    def read(self, layout: Layout) -> Layout:
        return layout.share(set(self.reads), self.slices)

    def written(self, layout: Layout) -> Layout:
        return layout.share(set(self.writes), self.slices)

    def lacks(self) -> set[str]:
        """What it reads and others write."""
        return {*self.reads}.difference(self.writes)


def sending(row: Neighbours, tensors: Iterable[Tensor], to: int) -> list[Callable[[], None]]:
    """Until what this returns has been called the tensors must stay as they are."""
    return [row.sending(tensor.contiguous(), to) for tensor in tensors]


def receive(row: Neighbours, tensors: Iterable[Tensor], source: int) -> None:
    for tensor in tensors:
        if tensor.is_contiguous():
            row.receive(tensor, source)
        else:  # a slice
            tensor.copy_(row.receive(torch.empty(tensor.shape, dtype=tensor.dtype), source))


def say(row: Neighbours, what: object, to: int) -> None:
    text = bytearray(msgspec.msgpack.encode(what))
    for said in (torch.tensor([len(text)]), torch.frombuffer(text, dtype=torch.uint8)):
        row.send(said, to)


def hear(row: Neighbours, source: int, kind: type[T]) -> T:
    """Raises `NeighbourLost` for what is nothing of that kind."""
    length = int(row.receive(torch.zeros(1, dtype=torch.int64), source))
    if not 0 <= length <= MOST_BYTES:
        raise NeighbourLost(f"part {source} says that its share takes {length} bytes")
    text = row.receive(torch.empty(length, dtype=torch.uint8), source).numpy().tobytes()
    try:
        return msgspec.msgpack.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise NeighbourLost(f"part {source} says what is no share: {error}") from error


def _names(layout: Layout) -> list[str]:
    return [span.name for span in (*layout.parameters, *layout.buffers, *layout.counters)]
