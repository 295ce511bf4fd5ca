"""A `cluster.toml` of this machine: what a task's steps and exchanges take here, measured in processes as a run has.

Everything is timed in forked processes: the measuring one must not have threads of its own, and keeps its memory.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from squall.checks import require
from squall.errors import ProcessLost
from squall.launchers.control_pipe import ControlPipe
from squall.runtime.arena import SHARED_MEMORY
from squall.runtime.optimizers import check_optimizers, elementwise
from squall.runtime.processes import available_memory
from squall.runtime.seeds import chance_kept, seed_everything
from squall.sim.cluster.forks import answer, forked
from squall.sim.cluster.jitter import Trace
from squall.sim.cluster.measure_exchange import BYTES, exchange_seconds
from squall.sim.cluster.measure_reduce import ROUND_BYTES, able, empty_round_s, rounds
from squall.sim.cluster.measure_run import RUNS, overhead_of, running, single
from squall.sim.cluster.measure_steps import quantiles, rounded, running_counts, slowdowns, stepping
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.own_step import split_of
from squall.sim.cluster.parts import MachineKind
from squall.sim.cluster.quiet import BUSY, Turn, calmest, in_turns, others_in, quickest, times_of
from squall.sim.cluster.split_step import SplitStep
from squall.strategies import Downpour, Recipe, Strategy
from squall.strategies.work import Collective, Loop
from squall.task import OptimizerFactory, TaskFunction, check_task
from squall.vector import Layout

SIZES = (1_000, 100_000, 1_000_000, 10_000_000)  # elements of an exchange; and the model's own
MEMORY_SHARE = 0.25  # of what is free, for one measurement
EXCHANGES, ROUNDS = 1 / 6, 1 / 12  # of the time, for exchanges and for rounds without a task, of several sizes
SENT, SENDS = (1, 1_000, 100_000, 1_000_000), 1 / 4  # elements that a part sends; of the time, where there are parts
COPIED_BYTES = 1 << 28
LEAST_S = 1e-6  # of a round, beyond its steps


@dataclasses.dataclass(frozen=True)
class Measured:
    """What this machine does.

    Attributes:
        machine: all of it, its jitter the trace `trace_file`.
        steps: seconds of every step that ran alone, in their order.
        batch_size: examples of a step.
        elements: of the task's vector.
        others: share of the cores that other programs had in the moments that count, mean.
        split: what a batch is to the parts of a replica, if that was asked for.
    """

    machine: MachineKind
    steps: tuple[float, ...]
    batch_size: int
    elements: int
    others: float
    split: SplitStep | None = None

    @property
    def cluster(self) -> Cluster:
        return Cluster(machines=(self.machine,), split=self.split)


@chance_kept()
def measure(
    task: TaskFunction, strategy: Strategy | None = None, *, seconds: float = 20.0, threads: int = 1, parts: int = 1,
    trace_file: str = "cluster.steps.txt", busy: bool = False,
) -> Measured:  # fmt: skip
    """Measure a task on this machine for about so many seconds.

    Args:
        task: as of `fit`.
        strategy: whose optimizer the measured shards have; None: SGD.
        seconds: for all measurements together, but at least three turns of a tenth of a second each.
        threads: torch threads of a replica.
        parts: of a replica, where what they send and what the task's split is to them is measured as well.
        trace_file: what the machine's jitter calls the file of step times, which is not written here.
        busy: measure also where other programs leave too little of the machine to tell what it does.

    Raises:
        ValueError: a setting or the task is wrong; or other programs take the cores, even in the calmest moments.
        TaskError: the task's own code failed.
    """
    require("seconds", seconds, 0 < seconds < math.inf, "positive")
    require("threads", threads, threads >= 1, "at least 1")
    require("parts", parts, parts >= 1, "at least 1")
    recipe = _on_shards((strategy or Downpour()).recipe())
    check_optimizers(recipe)
    optimizer = recipe.loop.update.optimizer
    seed_everything(0)
    built = check_task(task())
    layout = Layout.of(built.model, [group["params"] for group in built.param_groups()])
    cores = max(1, len(os.sched_getaffinity(0)) // threads)
    counts = running_counts(cores)
    points = _empty_rounds(optimizer, ROUNDS * seconds)
    with ExitStack() as stack:
        measured = stack.enter_context(stepping(built, layout, threads, counts))
        measured.append(stack.enter_context(single(built, layout, recipe.loop.tuned, threads)))
        roomy = RUNS * BYTES * layout.elements < MEMORY_SHARE * _free_bytes()
        if points and roomy:
            measured.append(stack.enter_context(rounds(built, layout, _of_members(strategy, optimizer), threads)))
        if roomy:  # else the vector is so large that what a run's own code takes is next to nothing
            measured += stack.enter_context(running(built, layout, optimizer, threads))
        calm = calmest(in_turns(measured, (1 - EXCHANGES - ROUNDS - (SENDS if parts > 1 else 0)) * seconds))
    others, turns = _calm_enough(calm, busy), quickest(calm)
    times = times_of(turn[0] for turn in turns)
    step_s = statistics.fmean(times)
    # Several are seldom all undisturbed, in a run as here, so their mean is of all turns.
    means = [step_s, *(statistics.fmean(times_of(turn[k] for turn in calm)) for k in range(1, len(counts)))]
    sizes = sorted({*SIZES, min(layout.elements, SIZES[-1])})
    machine = MachineKind(
        name="machine", cores=cores, step_s=rounded(step_s), jitter=Trace(trace_file, quantiles(times)),
        slowdown=slowdowns(counts, means, cores),
        single_s=rounded(statistics.median(times_of(turn[len(counts)] for turn in turns))),
        exchange=_by_size(exchange_seconds, sizes, BYTES, optimizer, EXCHANGES * seconds),
        memory=rounded(_memory_bandwidth()),
    )  # fmt: skip
    if roomy:
        overhead = overhead_of([[turn[0], *turn[-RUNS:]] for turn in turns], machine.work_s(layout.elements))
        machine = dataclasses.replace(machine, overhead=overhead)
    if points and roomy:  # the task's own is what counts
        own_s = _beyond_steps(calm, len(counts))
        points = {size: min(own_s, time) if size < layout.elements else time for size, time in points.items()}
        points[layout.elements] = own_s
    machine = dataclasses.replace(machine, reduce=tuple(sorted(points.items())))
    if parts == 1:
        return Measured(machine, tuple(times), built.batch_size, layout.elements, others)
    from squall.sim.cluster.measure_send import SEND_BYTES, send_seconds  # which imports torch's compiler

    sends = _by_size(lambda size, _, given_s: send_seconds(size, given_s), SENT, SEND_BYTES, optimizer, SENDS * seconds)
    machine = dataclasses.replace(machine, send=_rising(sends))
    split = split_of(Cluster(machines=(machine,)), built, parts, threads)
    return Measured(machine, tuple(times), built.batch_size, layout.elements, others, split)


def _rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Less is never taken to be slower: where that was measured, another process disturbed."""
    return tuple((size, min(seconds for other, seconds in points if other >= size)) for size, _ in points)


def _on_shards(recipe: Recipe) -> Recipe:
    """One with shards and, where they can have it, the recipe's optimizer."""
    if isinstance(recipe.work, Loop):
        return recipe
    if isinstance(recipe.work, Collective) and elementwise(recipe.work.optimizer):
        return Downpour(optimizer=recipe.work.optimizer).recipe()
    return Downpour().recipe()


def _empty_rounds(optimizer: OptimizerFactory, seconds: float) -> dict[int, float]:
    """Elements -> seconds. None where replicas form no group, so that there is no all-reduce."""
    if not able():
        return {}
    try:
        return dict(_by_size(empty_round_s, SIZES[::3], ROUND_BYTES, optimizer, seconds))
    except ProcessLost:
        return {}


def _beyond_steps(turns: Sequence[Turn], counts: int) -> float:
    """Seconds of a round of two replicas beyond the steps of two at once, which are the second thing of each turn."""
    found = []
    for turn in turns:
        step_s = statistics.fmean(times_of([turn[1]])) if counts > 1 else 2 * statistics.fmean(times_of([turn[0]]))
        found.append(statistics.fmean(times_of([turn[counts + 1]])) - step_s)
    return rounded(max(LEAST_S, statistics.median(found)))


def _of_members(strategy: Strategy | None, otherwise: OptimizerFactory) -> OptimizerFactory:
    work = strategy.recipe().work if strategy is not None else None
    return work.optimizer if isinstance(work, Collective) else otherwise


def _calm_enough(turns: Sequence[Turn], busy: bool) -> float:
    """The others' mean share of the cores. Raises `ValueError` where it is too much."""
    others = statistics.fmean(map(others_in, turns))
    if others > BUSY and not busy:
        raise ValueError(
            f"other programs have {others:.0%} of this machine's cores even in the calmest moments: measure again when"
            " it is quiet, look longer for such moments (--seconds), or measure what they leave (--busy)"
        )
    return others


def write(cluster: Cluster, path: Path, comment: str) -> list[Path]:
    """The cluster file, and beside it its machines' traces, which are returned. `comment` stands at the top."""
    traces = []
    for jitter in (machine.jitter for machine in cluster.machines):
        if isinstance(jitter, Trace):
            traces.append(path.parent / jitter.file)
            lines = "".join(f"{time!r}\n" for time in jitter.times)
            traces[-1].write_text(f"# seconds of a step, from the shortest to the longest\n{lines}")
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    path.write_text(f"{head}\n{cluster.to_toml()}", encoding="utf-8")
    return traces


# ---------------------------------------------------------------- exchanges and memory


def _by_size(
    timed: Callable[[int, OptimizerFactory, float], float], sizes: Sequence[int], size_bytes: int,
    optimizer: OptimizerFactory, seconds: float,
) -> tuple[tuple[int, float], ...]:  # fmt: skip
    """(elements, seconds), of sizes that memory allows."""
    room = MEMORY_SHARE * _free_bytes()
    sizes = [size for size in sizes if size_bytes * size <= room] or sizes[:1]
    return tuple((size, rounded(timed(size, optimizer, seconds / len(sizes)))) for size in sizes)


def _free_bytes() -> int:
    """Of memory, or of what processes may share of it."""
    shared = os.statvfs(SHARED_MEMORY)
    return min(available_memory(), shared.f_bavail * shared.f_frsize)


def _memory_bandwidth() -> float:
    """Bytes a second that one core reads and writes in a large copy."""
    size = max(1 << 20, min(COPIED_BYTES, int(MEMORY_SHARE * _free_bytes() / 2)))
    with forked([partial(_copies, size)]) as lines:
        times: list[float] = answer(*lines)["times"]
    return 2 * size / statistics.median(times)


def _copies(size: int, line: ControlPipe) -> None:
    torch.set_num_threads(1)
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    times = []
    for _ in range(7):
        begun = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begun)
    line.say(times=times)
