"""What the process of a part does with its time, and how much memory it has."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch._C._distributed_c10d import Work

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
        self._began = (0.0, 0.0, 0.0)  # what is at work now: when, and what it had waited and been elsewhere by then
        self._works = self._waits = False

    def told(self) -> tuple[float, float, float]:
        """Seconds at work without waiting, seconds of these in a pipeline's stages, bytes."""
        return self._busy_s, self._stages_s, float(self.memory)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self.begin()
        yield
        self.end()

    def begin(self) -> None:
        """It is at work from now on."""
        self._works, self._began = True, (time.perf_counter(), self.waited_s, self._elsewhere_s)

    def end(self) -> None:
        """It is not at work any more, if it was."""
        self.count()
        self._rounds += self._works
        self._works = False

    def count(self) -> None:
        """Take what is at work into account up to now."""
        if not self._works:
            return
        started, waited, elsewhere = self._began
        self.begin()
        seconds = self._began[0] - started - (self._elsewhere_s - elsewhere)
        self.total_s += seconds
        self._busy_s += max(0.0, seconds - (self.waited_s - waited))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        if self._waits:  # it is counted already
            yield
            return
        started, self._waits = time.perf_counter(), True
        try:
            yield
        finally:
            self._waits = False
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
    runs, which ends last, and it has no microbatch to compute. Others may tell any numbers: they are kept in bounds,
    as is a part that begins a batch, and computes, while the first one has yet to begin it.
    """
    found: list[float] = []
    bounded = ([min(MOST, max(0.0, number)) for number in told] for told in others)
    for told_s, stages_s, memory in (own.told(), *bounded):
        busy_s = min(told_s, own.total_s)
        idle_s = own.total_s - busy_s
        # A part that begins late with a batch is busy while the first part's schedule runs already.
        bubble_s = min(idle_s, max(0.0, own.schedule_s - stages_s))
        found += [busy_s, idle_s - bubble_s, bubble_s, memory]
    return tuple(found)


def count_waits(spent: Spent) -> None:
    """Count what this process's main thread waits for operations of any process group, whoever has asked for them.

    torch has no hook for it, and a group of our own around Gloo's would have to do all that users may ask of one.
    """
    main, wait = threading.get_ident(), Work.wait

    def counted(work: Work, *arguments: Any, **named: Any) -> Any:
        if threading.get_ident() != main:
            return wait(work, *arguments, **named)
        with spent.waiting():
            return wait(work, *arguments, **named)

    Work.wait = counted  # type: ignore[method-assign, assignment]
