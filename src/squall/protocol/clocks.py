"""How many replicas are at which clock, so that a shard need not look at each of thousands to find the slowest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Clocks:
    """How many replicas are at which clock."""

    def __init__(self, clocks: Iterable[int] = ()) -> None:
        self._at = dict(Counter(clocks))

    def move(self, before: int, after: int) -> None:
        at = self._at
        left = at[before] - 1
        if left:
            at[before] = left
        else:
            del at[before]
        at[after] = at.get(after, 0) + 1

    def slowest(self) -> int:
        """The lowest clock; 0 without replicas, where nobody is waited for."""
        return min(self._at, default=0)

    def beyond(self, clock: int) -> int:
        return sum(count for other, count in self._at.items() if other > clock)
