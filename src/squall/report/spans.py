"""Ranges of positions, and how often each position lies in them: read in turn, and no position is enumerated."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby
from operator import itemgetter


@dataclass(frozen=True, slots=True)
class TrainedRange:
    """Positions ``[start, stop)`` of an epoch's order, each trained `times` times."""

    start: int
    stop: int
    times: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        last = f" to {self.stop - 1:,}" if len(self) > 1 else ""
        return f"{self.start:,}{last}" + (f" ({self.times} times)" if self.times > 1 else "")


def coverage(ranges: Iterable[tuple[int, int]]) -> Iterator[TrainedRange]:
    """How often each position lies in one of the half-open `ranges`, which come by their start; from 0 to the last."""
    start = times = 0
    for position, edges in groupby(_edges(ranges), key=itemgetter(0)):
        if change := sum(step for _, step in edges):
            if position > start:
                yield TrainedRange(start, position, times)
            start, times = position, times + change


def _edges(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Where ranges begin (1) and end (-1), in order."""
    stops: list[int] = []  # of the ranges that are open here
    for start, stop in ranges:
        while stops and stops[0] <= start:
            yield heappop(stops), -1
        yield start, 1
        heappush(stops, stop)
    yield from ((stop, -1) for stop in sorted(stops))


def spans_of(ranges: Iterable[tuple[int, int]], size: int) -> tuple[TrainedRange, ...]:
    """How often each position of ``[0, size)`` lies in one of the half-open `ranges`."""
    return tuple(padded(coverage(sorted(r for r in ranges if r[0] < r[1])), size))


def padded(spans: Iterable[TrainedRange], end: int) -> Iterator[TrainedRange]:
    """The spans, and one for what is missing up to `end`."""
    stop = 0
    for span in spans:
        yield span
        stop = span.stop
    if stop < end:
        yield TrainedRange(stop, end, 0)
