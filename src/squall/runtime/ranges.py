"""Which elements of the vector go with a payload: a shard's range, or what a part of a replica has of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from squall.protocol.effects import Payload
from squall.vector import Layout

if TYPE_CHECKING:
    from squall.parts.shares import Share

Run = tuple[int, int]  # elements [start, stop)


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
        self._found: dict[tuple[int, int, bool], tuple[Run, ...]] = {}

    def __call__(self, payload: Payload) -> tuple[Run, ...]:
        """Raises `ValueError` for what there is not."""
        pushed = payload.kind == "gradient" or self._own_weights
        key = payload.shard, payload.part, pushed
        if key not in self._found:
            if not 0 <= payload.shard < len(self.shards):
                raise ValueError(f"there is no place for {payload}")
            self._found[key] = self._clipped(*key)
        return self._found[key]

    def _clipped(self, shard: int, part: int, pushed: bool) -> tuple[Run, ...]:
        start, stop = self.shards[shard]
        if part < 0:
            return ((start, stop),)
        if part >= len(self._shares):
            raise ValueError(f"a replica has no part {part}")
        share = self._shares[part]
        runs = sorted(_runs(share.writes if pushed else share.reads))
        return tuple((max(a, start), min(b, stop)) for a, b in runs if a < stop and b > start)


def _runs(layout: Layout) -> Iterator[Run]:
    """What a share has of the vector, slices row by row."""
    for view in layout.regions(torch.empty(layout.length, device="meta")):
        start, step = int(view.storage_offset()), int(view.stride(0))
        if view.is_contiguous():
            yield start, start + view.numel()
        else:  # of a matrix
            yield from ((at, at + view.shape[1]) for at in range(start, start + step * len(view), step))
