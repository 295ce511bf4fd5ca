"""What the process of a part does with its time, and how much memory it has."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from squall.runtime.processes import private_bytes

LOOK_AFTER = 2  # computations, with which all is there that a part needs
LOOK_SHARE = 0.001  # of the time, at most, goes into looking at memory
NUMBERS = 3  # that a part tells: see `Spent.told`
MOST = 1e15  # of each, as in `Stats.inside`


class Spent:
    """Seconds of this process since it began, on its own clock.

    Attributes:
        total_s: at what the replica was told to do; it computed, or waited for neighbours.
        waited_s: for neighbours, also where the replica had nothing to do.
        schedule_s: in schedules of a pipeline, from a part's first look at a batch to its last.
        memory: bytes of its own, the most that was seen.
    """

    def __init__(self) -> None:
        self.total_s = self.waited_s = self.schedule_s = 0.0
        self.memory = 0
        self._busy_s = self._elsewhere_s = 0.0
        self._stages_s = 0.0  # computing in what `schedule_s` counts
        self._stage_s = 0.0  # and in the schedule that runs
        self._rounds = 0
        self._look_at = 0.0

    def told(self) -> tuple[float, float, float]:
        """Seconds at work without waiting, seconds of these in a pipeline's stages, bytes."""
        return self._busy_s, self._stages_s, float(self.memory)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        started, waited, elsewhere = time.perf_counter(), self.waited_s, self._elsewhere_s
        yield
        seconds = time.perf_counter() - started - (self._elsewhere_s - elsewhere)
        self.total_s += seconds
        self._busy_s += max(0.0, seconds - (self.waited_s - waited))
        self._rounds += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - started

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What passes in here is not the replica's own time: it is with other replicas."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._elsewhere_s += time.perf_counter() - started

    @contextmanager
    def in_schedule(self, counts: bool) -> Iterator[None]:
        """What is not computing in here is waiting. A schedule's first use, which opens connections, does not count."""
        started, self._stage_s = time.perf_counter(), 0.0
        yield
        seconds = time.perf_counter() - started
        self.waited_s += max(0.0, seconds - self._stage_s)
        if counts:
            self.schedule_s += seconds
            self._stages_s += self._stage_s

    @contextmanager
    def in_stage(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._stage_s += time.perf_counter() - started

    def look(self) -> None:
        """At memory, if it is time to. It takes up to 40 ms, so this is called where nobody waits."""
        started = time.perf_counter()
        if self._rounds >= LOOK_AFTER and started >= self._look_at:
            self.memory = max(self.memory, private_bytes())
            now = time.perf_counter()
            self._look_at = now + (now - started) / LOOK_SHARE


def measured(own: Spent, others: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """Of each part, the first being `own`: seconds computing, waiting, in a pipeline's bubble, and bytes.

    The three add up to the time that the replica was at work. A part is in the bubble while the first part's schedule
    runs, which ends last, and it has no microbatch to compute. Others may tell any numbers: they are kept in bounds.
    """
    found: list[float] = []
    bounded = ([min(MOST, max(0.0, number)) for number in told] for told in others)
    for busy_s, stages_s, memory in (own.told(), *bounded):
        idle_s = max(0.0, own.total_s - busy_s)
        # A part that begins late with a batch is busy while the first part's schedule runs already.
        bubble_s = min(idle_s, max(0.0, own.schedule_s - stages_s))
        found += [busy_s, idle_s - bubble_s, bubble_s, memory]
    return tuple(found)
