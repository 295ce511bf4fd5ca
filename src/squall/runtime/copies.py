"""Copies of a shard's numbers, to which its successor goes back where a death inside an update has torn them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from torch import Tensor

from squall.protocol.events import CopyMade
from squall.runtime.legacy import Legacy
from squall.runtime.processes import available_memory

NEEDS = 4  # times as much memory as the weights: two more vectors, as most optimizers have, and some that stays free
SHARE = 100  # of the time between the ends of two copies one takes at most a hundredth
SELDOM_S = 0.25  # from one to the next at least: the coordinator is told of each


class Copying:
    """Makes them while the shard would wait anyway."""

    def __init__(
        self, legacy: Legacy, weights: Tensor, before: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:  # fmt: skip
        """`before`: updates in the numbers when the attempt began."""
        self._numbers, self._copy = legacy.numbers, legacy.copy
        self._weights, self._before, self._clock = weights, before, clock
        self._none = self._copy.updates < 0 and available_memory() < NEEDS * weights.nbytes  # there is no room for one
        self._due = self._late = -math.inf
        self._upto = self._copy.updates
        self._made: CopyMade | None = None

    def rest(self) -> None:
        if self._clock() >= self._due and self._upto != self._numbers.updates:
            self.make()

    def updated(self) -> None:
        """A shard that never rests makes copies between its updates, half as often."""
        if self._clock() >= self._late:
            self.make()

    def make(self) -> None:
        began = self._clock()
        if not (self._none or self._numbers.lacking):  # else nobody would go back, and nothing is remembered for that
            self._copy.make(self._weights)
        ended = self._clock()
        pause_s = max(SELDOM_S, SHARE * (ended - began))
        self._due, self._late = ended + pause_s, ended + 2 * pause_s
        self._upto = self._numbers.updates
        self._made = CopyMade(self._before + self._upto)

    def told(self) -> CopyMade | None:
        """The newest, once."""
        made, self._made = self._made, None
        return made
