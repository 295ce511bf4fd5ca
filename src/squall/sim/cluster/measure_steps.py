"""The steps of a task, in one process and in several at once, and what their times say of a machine."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from squall.launchers.control_pipe import ControlPipe
from squall.protocol.effects import Compute
from squall.runtime.arena import Arena, Shape
from squall.runtime.backward import Backward
from squall.runtime.batches import Key, TrainingBatches
from squall.runtime.compute import Gradients
from squall.runtime.job import initial_vector
from squall.runtime.processes import keep_freed_memory
from squall.sim.cluster.forks import answer, forked
from squall.sim.cluster.quiet import Moment, Stopwatch, Timed, moment
from squall.task import Task
from squall.vector import Layout

WARM_UP_STEPS, AHEAD = 5, 8
MOST_WARM_UP_S = 1.0
LONGER = 3  # than other moments: steps are what all else is a factor on
MOST_TIMES = 400  # lines of a trace


@contextmanager
def stepping(task: Task, layout: Layout, threads: int, counts: Sequence[int]) -> Iterator[list[Timed]]:
    """For each count, so many processes that compute at once; their moments say the `times` of steps."""
    with forked([partial(_steps, task, layout, threads)] * counts[-1]) as lines:
        for line in lines:
            answer(line)  # it has warmed up
        yield [partial(_at_once, lines[:count]) for count in counts]


def _at_once(lines: Sequence[ControlPipe], seconds: float) -> Moment:
    return moment(lines, LONGER * seconds)


def _steps(task: Task, layout: Layout, threads: int, line: ControlPipe) -> None:
    """In a process like a replica's: gradients of batch after batch, as a run computes them."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    arena = Arena.private(Shape(layout.length, 1, groups=len(layout.group_starts)))
    arena.weights(0, 0).copy_(initial_vector(layout, task))
    backward = Backward(task, layout, [arena.weights(0, 0)], 0, torch.device("cpu"))
    gradients = Gradients(backward, [arena.gradient(0, 0)], [arena.rates(0, 0)])
    gradients.use(0)
    batches = _announced(task, gradients.batches)
    begun = time.monotonic()
    for _ in range(WARM_UP_STEPS):
        gradients.compute(next(batches))
        if time.monotonic() - begun > MOST_WARM_UP_S:
            break
    line.say(ready=True)
    watch = Stopwatch(threads)
    while (said := line.hear()) is not None:
        times: list[float] = []
        while not times or time.monotonic() < said["until"]:
            effect = next(batches)
            watch.restart()
            gradients.compute(effect)
            times.append(watch.seconds())
        line.say(times=times)


def _announced(task: Task, batches: TrainingBatches) -> Iterator[Compute]:
    """Batches of which the loader is told some time before, as a replica tells it of those of a lease."""
    ahead: deque[Compute] = deque()
    for effect in _epochs(task):
        batches.expect(Key(effect.epoch, effect.start, effect.stop))
        ahead.append(effect)
        if len(ahead) > AHEAD:
            yield ahead.popleft()


def _epochs(task: Task) -> Iterator[Compute]:
    """Epoch after epoch, its short last batch included."""
    for epoch in itertools.count():
        for start in range(0, task.examples, task.batch_size):
            stop = min(start + task.batch_size, task.examples)
            yield Compute(epoch, start, stop, buffer=0, accumulate=False, local_step=False)


def running_counts(cores: int) -> list[int]:
    """How many processes are measured at once: all numbers of a few cores, powers of two up to many."""
    if cores <= 4:
        return list(range(1, cores + 1))
    return sorted({*(1 << k for k in range(cores.bit_length())), cores})


def slowdowns(counts: Sequence[int], means: Sequence[float], cores: int) -> tuple[float, ...]:
    """Factor for 1 to `cores` processes from the mean steps of some numbers of them, linear in between.

    More processes are never taken to be faster: where that was measured, it was another process that disturbed.
    """
    factors: list[float] = []
    for mean in means:
        factors.append(max([1.0, *factors, rounded(mean / means[0])]))
    found = [1.0]
    for (low, high), (least, most) in zip(itertools.pairwise(counts), itertools.pairwise(factors)):
        found += [least + (most - least) * (k - low) / (high - low) for k in range(low + 1, high + 1)]
    assert len(found) == cores
    return tuple(found)


def quantiles(times: Sequence[float]) -> tuple[float, ...]:
    """The times in their order of size; of many, the means of equal parts, which keep the mean of all."""
    ordered = sorted(times)
    if len(ordered) <= MOST_TIMES:
        return tuple(ordered)
    sums = [0.0, *itertools.accumulate(ordered)]
    part = len(ordered) / MOST_TIMES  # a time may lie in two parts

    def below(place: float) -> float:
        whole = min(int(place), len(ordered) - 1)
        return sums[whole] + (place - whole) * ordered[whole]

    return tuple(rounded((below((k + 1) * part) - below(k * part)) / part, 6) for k in range(MOST_TIMES))


def rounded(value: float, digits: int = 4) -> float:
    """So many significant digits: the file is for people too, and no measurement has more."""
    return float(f"{value:.{digits}g}")
