"""What other programs do on a machine while it is measured, and how a measurement does without it.

Two things keep the figures of a busy machine true. The kernel tells how long a process waited for a core, and that is
subtracted. And what is measured is cut into moments, those of different things in turns: the turns count in which other
programs took least, because a core's caches and its share of the memory suffer from them as well. The kernel does not
see the neighbours of a virtual machine, but the same steps take longer then. So what one process does alone is taken
from the turns in which its steps were quickest, and figures are subtracted from each other within one turn only.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from squall.launchers.control_pipe import ControlPipe
from squall.sim.cluster.forks import answer

CALM = 0.05  # share of the cores that others may take in a moment that counts in any case
KEPT = 0.25  # of the moments count in any case
BUSY = 0.5  # others' share, in those that count, beyond which nothing can be said of the machine
MOMENT_S, FEWEST_TURNS = 0.1, 3
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Moment(NamedTuple):
    others: float  # share of the cores' time that other programs had
    said: list[dict[str, Any]]  # by each process that measured


Timed = Callable[[float], Moment]  # measures for about so many seconds


def moment(lines: Sequence[ControlPipe], seconds: float, beside: Sequence[ControlPipe] = ()) -> Moment:
    """Let processes measure at once for about so long; those `beside` may only fail. Raises as `answer` does."""
    before, began = _others_s(), time.monotonic()
    for line in lines:
        line.say(until=began + seconds)
    said = [answer(line, *beside) for line in lines]
    cores = len(os.sched_getaffinity(0))
    return Moment(max(0.0, _others_s() - before) / (cores * (time.monotonic() - began)), said)


Turn = Sequence[Moment]  # one of each thing that is measured


def in_turns(measured: Sequence[Timed], seconds: float) -> list[Turn]:
    """Moments of one thing after another, for about so long: what makes a machine slow for a while meets them all."""
    turns: list[Turn] = []
    until = time.monotonic() + seconds
    while len(turns) < FEWEST_TURNS or time.monotonic() < until:
        turns.append([timed(MOMENT_S) for timed in measured])
    return turns


def calmest(turns: Sequence[Turn]) -> list[Turn]:
    """The turns that count: all that are calm, and a quarter at least."""
    ordered = sorted(turns, key=others_in)
    least = max(1, round(KEPT * len(ordered)))
    return [turn for number, turn in enumerate(ordered) if number < least or others_in(turn) <= CALM]


def quickest(turns: Sequence[Turn]) -> list[Turn]:
    """Half of the turns: those in which the first thing's `times` were shortest, which no neighbour disturbed."""
    ordered = sorted(turns, key=lambda turn: statistics.fmean(times_of([turn[0]])))
    return ordered[: (len(ordered) + 1) // 2]


def times_of(moments: Iterable[Moment]) -> list[float]:
    """The times that all processes have said of these moments."""
    return [time for moment in moments for said in moment.said for time in said["times"]]


def others_in(turn: Turn) -> float:
    """Mean share of the cores' time that other programs had."""
    return statistics.fmean(moment.others for moment in turn)


def _others_s() -> float:
    """Seconds for which this process's cores have worked for others than it and its children."""
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    busy = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in cores:
            user, nice, system, _, _, *interrupts = map(int, ticks[:8])
            busy += user + nice + system + sum(interrupts)
    return busy * _TICK_S - sum(core_s(pid) for pid in [os.getpid(), *_children()])


def _children() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def core_s(pid: int) -> float:
    """Seconds of cores that a process has had, all its threads together; 0 where it is gone."""
    return _scheduled_s(pid, 0)


def waited_s(pid: int) -> float:
    """Seconds for which a process's threads were ready and had no core, all together."""
    return _scheduled_s(pid, 1)


def _scheduled_s(pid: int, column: int) -> float:
    total = 0  # nanoseconds: schedstat's first number is on a core, the second ready and without one
    with suppress(OSError):  # it has ended, or the kernel does not count
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[column])
    return total / 1e9


class Enough(Exception):
    """There is no more to measure."""


class Chunks:
    """What a measuring process is told and says: when a moment is over it says what came out, and hears of the next."""

    def __init__(self, line: ControlPipe) -> None:
        self._line = line
        self._until = 0.0

    def over(self) -> bool:
        return time.monotonic() >= self._until

    def begin(self) -> None:
        """Wait to be told. Raises `Enough` when there is no more to measure."""
        said = self._line.hear()
        if said is None:
            raise Enough
        self._until = said["until"]

    def next(self, **found: object) -> None:
        """Raises `Enough` as `begin` does."""
        self._line.say(**found)
        self.begin()


class Stopwatch:
    """Times what this process does, without what it waited for a core.

    Of several threads each waits on its own; they compute together, so what one of them waited they all did. Never less
    than the cores' time that all had, divided by their number.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._files: list[int] = []
        with suppress(OSError):
            self._files = [os.open(t / "schedstat", os.O_RDONLY) for t in Path("/proc/self/task").iterdir()]
        self.restart()

    def restart(self) -> None:
        self._core, self._waited, self._wall = time.process_time(), self._waited_s(), time.perf_counter()

    def seconds(self) -> float:
        """Since `restart`."""
        wall = time.perf_counter() - self._wall
        core, waited = time.process_time() - self._core, self._waited_s() - self._waited
        return max(wall - waited, core / self._threads)

    def _waited_s(self) -> float:
        return sum(int(os.pread(file, 100, 0).split()[1]) for file in self._files) / 1e9
