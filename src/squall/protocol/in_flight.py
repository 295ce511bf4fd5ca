"""An exchange that is under way: what a replica has pushed with it, and what its shards answer."""

from __future__ import annotations

import sys
from array import array
from typing import NamedTuple

from squall.protocol.messages import Exchanged
from squall.protocol.report_sums import NO_WORK


class Answers(NamedTuple):
    """Those of all shards, put together."""

    first: int  # least of their clocks for the replica
    last: int
    versions: list[int]
    examples: int  # behind the weights, of the shard that has fewest
    dropped: bool  # a shard came too late with the push


class ExchangeInFlight:
    """Answers are looked at when all are there, together: thousands of replicas are simulated at once."""

    __slots__ = ("_answers", "fetching", "missing", "work")

    def __init__(self) -> None:
        self.work = NO_WORK  # behind the push
        self.fetching = -1  # weights buffer that is filled; -1: nothing is fetched
        self.missing = 0  # answers to come
        self._answers: list[Exchanged | None] = []  # of each shard

    def begin(self, shards: int) -> None:
        self._answers, self.missing = [None] * shards, shards

    def answered(self, shard: int, message: Exchanged) -> bool:
        """Whether all have."""
        assert self.missing, f"shard {shard} was not asked"
        assert self._answers[shard] is None, f"shard {shard} answered twice"
        self._answers[shard] = message
        self.missing -= 1
        return not self.missing

    def answers(self, staleness: array[int]) -> Answers:
        """Of all shards; how stale the push was at each is appended."""
        clocks, versions, dropped, examples = [], [], False, sys.maxsize
        for answer in self._answers:
            assert answer is not None
            clocks.append(answer.clock)
            versions.append(answer.version)
            dropped |= answer.dropped
            examples = min(examples, answer.examples)
            if answer.staleness >= 0:
                staleness.append(answer.staleness)
        self._answers = []
        return Answers(min(clocks), max(clocks), versions, examples, dropped)
