"""Which elements of the vector go with a payload: a shard's range, or what a part of a replica has of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from squall.protocol.effects import Payload
from squall.vector import Layout

if TYPE_CHECKING:
    from squall.parts.shares import Share


class Block(NamedTuple):
    """Rows of consecutive elements; of a slice of a matrix there are many."""

    start: int
    length: int
    rows: int = 1
    step: int = 0  # from one row to the next


class Elements:
    """Some of a vector. There is one object for all who ask for the same."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self.count = sum(block.rows * block.length for block in blocks)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """[start, stop) of consecutive ones."""
        starts = ((b.start + row * b.step, b.length) for b in self._blocks for row in range(b.rows))
        return [(start, start + length) for start, length in starts]

    def of(self, vector: Tensor, start: int = 0) -> list[Tensor]:
        """Views of them; the vector begins at element `start` of the whole one."""
        begin = vector.storage_offset() - start
        return [vector.as_strided((b.rows, b.length), (b.step, 1), begin + b.start) for b in self._blocks]


class Ranges:
    """Called with a payload."""

    def __init__(
        self, layout: Layout, shards: int, shares: Sequence[Share] = (), own_weights: bool = False
    ) -> None:  # fmt: skip
        """`shares` has what each part has of the vector; replicas with `own_weights` move those that they write."""
        self.length = layout.length
        # Where there are no shards a replica shows, or saves, all of its vector.
        self.shards = [layout.shard_range(shard, shards) for shard in range(shards)] or [(0, layout.length)]
        self._shares, self._own_weights = shares, own_weights
        self._found: dict[tuple[int, int, bool], Elements] = {}

    def __call__(self, payload: Payload) -> Elements:
        """Raises `ValueError` for what there is not."""
        pushed = payload.kind == "gradient" or self._own_weights
        key = payload.shard, payload.part, pushed
        if key not in self._found:
            if not (0 <= payload.shard < len(self.shards) and -1 <= payload.part < max(1, len(self._shares))):
                raise ValueError(f"there is no place for {payload}")
            self._found[key] = Elements(self._clipped(*key))
        return self._found[key]

    def _clipped(self, shard: int, part: int, pushed: bool) -> list[Block]:
        start, stop = self.shards[shard]
        if part < 0 or not self._shares:
            return [Block(start, stop - start)]
        share = self._shares[part]
        layout = share.writes if pushed else share.reads
        return [clipped for block in _blocks(layout) for clipped in _within(block, start, stop)]


def _blocks(layout: Layout) -> Iterator[Block]:
    for view in layout.regions(torch.empty(layout.length, device="meta")):
        start = int(view.storage_offset())
        if view.is_contiguous():
            yield Block(start, view.numel())
        else:
            yield Block(start, view.shape[1], len(view), int(view.stride(0)))


def _within(block: Block, start: int, stop: int) -> Iterator[Block]:
    """What of it is in [start, stop): whole rows together, and what is left of the two that the ends cut."""
    at, length, rows, step = block
    first, last = (0, 0) if rows == 1 else (-((at - start) // step), (stop - length - at) // step + 1)
    first = min(rows, max(0, first))
    last = min(rows, max(first, last))
    for row in (first - 1, last):
        low, high = max(start, at + row * step), min(stop, at + row * step + length)
        if 0 <= row < rows and low < high:
            yield Block(low, high - low)
    if first < last:
        yield Block(at + first * step, length, last - first, step)
