"""A `cluster.toml` of this machine: what a task's steps and exchanges take here, measured in processes as a run has.

Everything is timed in forked processes: the measuring one must not have threads of its own, and keeps its memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from squall.launchers.line import Line
from squall.protocol.core import Compute
from squall.run import TaskFunction
from squall.runtime.arena import SHARED_MEMORY, Arena, Shape
from squall.runtime.batches import Batches, Key
from squall.runtime.compute import Gradients
from squall.runtime.job import initial_vector
from squall.runtime.optimizers import check_optimizers
from squall.runtime.processes import keep_freed_memory
from squall.runtime.seeds import chance_kept, seed_everything
from squall.sim.cluster.forks import Work, answer, forked
from squall.sim.cluster.jitter import Trace
from squall.sim.cluster.measure_exchange import BYTES, exchange_seconds
from squall.sim.cluster.measure_run import overhead_of, quarter, single_s
from squall.sim.cluster.model import Cluster, Machine, Overhead
from squall.sim.cluster.quiet import BUSY, Moment, Stopwatch, calmest, moment
from squall.strategies import Downpour, Strategy
from squall.task import OptimizerFactory, Task, check_task
from squall.vector import Layout

SIZES = (1_000, 100_000, 1_000_000, 10_000_000)  # elements of an exchange; and the model's own
MEMORY_SHARE = 0.25  # of what is free, for one measurement
ROUND_S, ROUNDS = 0.5, 3  # of one process alone, two at once, ...; and how many there are at least
WARM_UP_STEPS, AHEAD = 5, 8
MOST_WARM_UP_S = 1.0
MOST_TIMES = 400  # lines of a trace
COPIED_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class Measured:
    """What this machine does.

    Attributes:
        machine: all of it, its jitter the trace `trace_file`.
        steps: seconds of every step that ran alone, in their order.
        batch_size: examples of a step.
        elements: of the task's vector.
        others: share of the cores that other programs had in the moments that count, mean.
    """

    machine: Machine
    steps: tuple[float, ...]
    batch_size: int
    elements: int
    others: float

    @property
    def cluster(self) -> Cluster:
        return Cluster(machines=(self.machine,))


@chance_kept()
def measure(
    task: TaskFunction, strategy: Strategy | None = None, *, seconds: float = 10.0, threads: int = 1,
    trace_file: str = "cluster.steps.txt", busy: bool = False,
) -> Measured:  # fmt: skip
    """Measure a task on this machine for about so many seconds.

    Args:
        task: as of `fit`.
        strategy: whose optimizer the measured shards have; None: SGD.
        seconds: for all measurements together, but at least three steps of each number of processes.
        threads: torch threads of a replica.
        trace_file: what the machine's jitter calls the file of step times, which is not written here.
        busy: measure also where other programs leave too little of the machine to tell what it does.

    Raises:
        ValueError: a setting or the task is wrong; or other programs take the cores, even in the calmest moments.
        TaskError: the task's own code failed.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds is {seconds}: it must be positive")
    if threads < 1:
        raise ValueError(f"threads is {threads}: it must be at least 1")
    recipe = (strategy or Downpour()).recipe()
    check_optimizers(recipe)
    seed_everything(0)
    built = check_task(task())
    layout = Layout.of(built.model, [group["params"] for group in built.param_groups()])
    cores = max(1, len(os.sched_getaffinity(0)) // threads)
    counts = running_counts(cores)
    moments = _rounds(partial(_steps, built, layout, threads), counts, seconds / 2)
    times = {count: _times(calmest(moments[count])) for count in counts}
    others = _calm_enough([each for count in counts for each in calmest(moments[count])], busy)
    means = [statistics.fmean(times[count]) for count in counts]
    exchange = _exchanges(layout.elements, recipe.optimizer, seconds / 6)
    alone_s = single_s(built, layout, recipe.local or recipe.optimizer, threads, seconds / 12)
    machine = Machine(
        name="machine", cores=cores, step_s=_rounded(means[0]), jitter=Trace(trace_file, quantiles(times[1])),
        single_s=_rounded(alone_s), slowdown=slowdowns(counts, means, cores), exchange=exchange,
        overhead=_overhead(built, layout, recipe.optimizer, threads, quarter(times[1]), seconds / 4),
        memory=_rounded(memory_bandwidth()),
    )  # fmt: skip
    return Measured(machine, tuple(times[1]), built.batch_size, layout.elements, others)


def _calm_enough(moments: Sequence[Moment], busy: bool) -> float:
    """The others' mean share of the cores. Raises `ValueError` where it is too much."""
    others = statistics.fmean(moment.others for moment in moments)
    if others > BUSY and not busy:
        raise ValueError(
            f"other programs have {others:.0%} of this machine's cores even in the calmest moments: measure again when"
            " it is quiet, look longer for such moments (--seconds), or measure what they leave (--busy)"
        )
    return others


def _overhead(
    task: Task, layout: Layout, optimizer: OptimizerFactory, threads: int, step_s: float, seconds: float
) -> Overhead:  # fmt: skip
    if BYTES * layout.elements > MEMORY_SHARE * _free_bytes():
        return Overhead()  # of so large a vector it is next to nothing
    found = overhead_of(task, layout, optimizer, threads, step_s, seconds)
    return Overhead(**{name: _rounded(value) for name, value in dataclasses.asdict(found).items()})


def write(measured: Measured, path: Path, comment: str) -> Path:
    """The cluster file, and beside it the trace, whose path is returned. `comment` stands at the top."""
    jitter = measured.machine.jitter
    assert isinstance(jitter, Trace)
    trace = path.parent / jitter.file
    trace.write_text(
        "# seconds of a step, from the shortest to the longest\n" + "".join(f"{t!r}\n" for t in jitter.times)
    )
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    path.write_text(f"{head}\n{measured.cluster.to_toml()}", encoding="utf-8")
    return trace


# ---------------------------------------------------------------- steps


def _rounds(work: Work, counts: Sequence[int], seconds: float) -> dict[int, list[Moment]]:
    """Count -> moments in which so many processes compute. In turns, so that a noisy moment meets them all.

    A step alone is what all else is a factor on: it gets as much time as all other counts together.
    """
    moments: dict[int, list[Moment]] = {count: [] for count in counts}
    rounds = max(ROUNDS, round(seconds / ROUND_S))
    with forked([work] * counts[-1]) as lines:
        for line in lines:
            answer(line)  # it has warmed up
        for count in [*counts] * rounds:
            share = 1.0 if len(counts) == 1 else 0.5 if count == 1 else 0.5 / (len(counts) - 1)
            moments[count].append(moment(lines[:count], share * seconds / rounds))
    return moments


def _times(moments: Sequence[Moment]) -> list[float]:
    return [time for moment in moments for said in moment.said for time in said["times"]]


def _steps(task: Task, layout: Layout, threads: int, line: Line) -> None:
    """In a process like a replica's: gradients of batch after batch, as a run computes them."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    arena = Arena.private(Shape(layout.length, 1, groups=len(layout.group_starts)))
    arena.weights(0, 0).copy_(initial_vector(layout, task))
    gradients = Gradients(
        task, layout, [arena.weights(0, 0)], [arena.gradient(0, 0)], [arena.rates(0, 0)], 0, torch.device("cpu")
    )
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


def _announced(task: Task, batches: Batches) -> Iterator[Compute]:
    """Batches some time before they are needed told to the loader, as a replica tells those of a lease."""
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
        factors.append(max([1.0, *factors, _rounded(mean / means[0])]))
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

    return tuple(_rounded((below((k + 1) * part) - below(k * part)) / part, 6) for k in range(MOST_TIMES))


# ---------------------------------------------------------------- exchanges and memory


def _exchanges(own: int, optimizer: OptimizerFactory, seconds: float) -> tuple[tuple[int, float], ...]:
    """(elements, seconds), of sizes that memory allows; the task's own among them, unless that is the largest."""
    sizes = sorted({*SIZES, min(own, SIZES[-1])})
    room = MEMORY_SHARE * _free_bytes()
    sizes = [size for size in sizes if BYTES * size <= room] or sizes[:1]
    return tuple((size, _rounded(exchange_seconds(size, optimizer, seconds / len(sizes)))) for size in sizes)


def _free_bytes() -> int:
    """Of memory, or of what processes may share of it."""
    shared = os.statvfs(SHARED_MEMORY)
    kib = next(line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line)
    return min(1024 * int(kib), shared.f_bavail * shared.f_frsize)


def memory_bandwidth() -> float:
    """Bytes a second that one core reads and writes in a large copy."""
    size = max(1 << 20, min(COPIED_BYTES, int(MEMORY_SHARE * _free_bytes() / 2)))
    with forked([partial(_copies, size)]) as lines:
        times: list[float] = answer(*lines)["times"]
    return 2 * size / statistics.median(times)


def _copies(size: int, line: Line) -> None:
    torch.set_num_threads(1)
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    times = []
    for _ in range(7):
        begun = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begun)
    line.say(times=times)


def _rounded(value: float, digits: int = 4) -> float:
    """So many significant digits: the file is for people too, and no measurement has more."""
    return float(f"{value:.{digits}g}")
