"""Where in its data a run is, as plain values: what a snapshot keeps of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec


class Range(NamedTuple):
    """Examples [start, stop) of an epoch's order. Sorts by epoch, then position."""

    epoch: int
    start: int
    stop: int


_HeldState = tuple[int, int, int, int, int]  # epoch, start, done, stop, replica


class Ledger(msgspec.Struct):
    """`Leases.state()`. What is absent in the ledger of another coordinator is 0 or empty."""

    examples: int = 0
    epoch: int = 0
    cursor: int = 0
    trained: int = 0
    steps: int = 0
    next_id: int = 0
    remaining: list[Range] = []
    held: dict[str, _HeldState] = {}  # by lease
    lost: dict[str, list[Range]] = {}  # of held ones: what a shard has lost, and nobody has told as trained
    since: dict[str, _HeldState] = {}  # alike: granted later, and partly in the files
    quarantined: list[Range] = []  # batches of epochs under way that gave NaN or Inf twice
    dealt: list[int] = []  # with `since`: epoch, cursor, steps and next_id at the end

    @property
    def leases(self) -> dict[str, _HeldState]:
        return self.held | self.since

    @property
    def dealt_upto(self) -> int:
        """The number of the next lease that is dealt from it."""
        return self.dealt[-1] if self.dealt else self.next_id


def size(span: Range) -> int:
    return span.stop - span.start


def gaps(found: Iterable[tuple[int, int]], examples: int, at: int = 0) -> list[tuple[int, int]]:
    """What is in none of these ranges, which may overlap, of so many examples, or of those from `at` on."""
    left = []
    for start, stop in sorted(found):
        if start > at:
            left.append((at, start))
        at = max(at, stop)
    return [*left, (at, examples)] if at < examples else left


def without(span: Range, gone: Range) -> list[Range]:
    """What is left of a range."""
    if span.epoch != gone.epoch:
        return [span]
    parts = (
        Range(span.epoch, span.start, min(span.stop, gone.start)),
        Range(span.epoch, max(span.start, gone.stop), span.stop),
    )  # fmt: skip
    return [part for part in parts if part.start < part.stop] if gone.start < gone.stop else [span]
