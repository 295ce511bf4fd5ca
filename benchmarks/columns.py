"""All-reduce of two replicas of two processes each: against bare torch with the same stages or slices.

Both loops are in the same four processes, one thread each, and alternate. A step is forward and backward passes, the
sum of the gradients with the same part of the other replica, and SGD. Ours begins at the hosts of the replicas' first
parts, and looks at the gradients for NaN; bare torch adds up one flat vector of them.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import squall
from benchmarks import parts
from benchmarks.results import Section
from squall.launchers.parts import with_own
from squall.parts.columns import ColumnMember, NearColumns
from squall.parts.host import Speaker, follow
from squall.parts.inside import inside
from squall.parts.neighbours import Neighbours
from squall.plan import make_plan
from squall.protocol.effects import JoinGroup, Step
from squall.protocol.nodes import replica_node
from squall.runtime.collective.host import CollectiveHost
from squall.runtime.collective.member import Member
from squall.runtime.groups import Group
from squall.runtime.inside import local
from squall.runtime.job import Job, own_model, private_job
from squall.runtime.processes import keep_freed_memory
from squall.vector import Layout

REPLICAS, PARTS = 2, 2
ROUNDS, STEPS = 30, 3
NODES = tuple(replica_node(slot, 0) for slot in range(REPLICAS))


def measure(width: int = 1024, blocks: int = 4, batch: int = 512, times: int = ROUNDS) -> Section:
    print("columns", flush=True)
    section = Section(
        "All-reduce of replicas of two processes",
        f"Steps of a perceptron with {2 * blocks} layers of {width}, two replicas of two processes of one thread,"
        f" {batch} examples each, {parts.MICROBATCHES} microbatches, SGD: against bare torch with the same stages or"
        f" slices in the same processes, which adds up one flat gradient a process. {times} rounds of {STEPS} steps.",
    )
    splits: dict[str, squall.splits.Split] = {
        "pipeline, 1F1B": squall.Pipeline(microbatches=parts.MICROBATCHES),
        "slices": squall.Tensor({"*.up": "column", "*.down": "row"}),
    }
    for name, split in splits.items():
        own, bare = _run(_job(parts.task(split, width, blocks, batch)), (0, blocks // 2), times)
        ratio = statistics.median(b / o for o, b in zip(own, bare))
        rates = [f"{REPLICAS * batch / statistics.median(seconds):,.0f} examples/s" for seconds in (own, bare)]
        print(f"  {name}: {ratio:.3f}, {rates}", flush=True)
        section.at_least(name, rates[0], f"bare {rates[1]}", ratio, 0.92)
    return section


def _job(given: squall.Task) -> Job:
    layout = Layout.of(given.model, [group["params"] for group in given.param_groups()])
    strategy = squall.AllReduce(replicas=REPLICAS, optimizer=partial(torch.optim.SGD, lr=parts.LR))
    plan = make_plan(strategy, squall.Settings(threads=1, parts=PARTS))
    return private_job(plan, strategy, given, layout, Path())


def _run(job: Job, starts: tuple[int, ...], times: int) -> tuple[list[float], list[float]]:
    """Seconds of a step, ours and bare torch's, round by round."""
    context = get_context("fork")
    barrier, results = context.Barrier(REPLICAS * PARTS), context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        rows = [with_own(replace(job, scratch=Path(folder))) for _ in range(REPLICAS)]
        processes = [
            context.Process(target=_enter, args=(row, slot, part, starts, times, barrier, results))
            for slot, row in enumerate(rows)
            for part in range(PARTS)
        ]
        for process in processes:
            process.start()
        found: tuple[list[float], list[float]] = results.get()
        for process in processes:
            process.join()
    return found


def _enter(
    job: Job, slot: int, part: int, starts: tuple[int, ...], times: int, barrier: Barrier, results: Any
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    keep_freed_memory()
    assert job.scratch is not None
    pids = [os.getpid()] * 2  # none of them dies
    neighbours = Neighbours(Group(f"row-{slot}", job.scratch, pids, part), part, PARTS)
    column = Group(f"bare-{part}", job.scratch, pids, slot)
    bare = _bare(own_model(job).task, starts, neighbours, column, slot)
    place = inside(job.task, job.layout, starts, neighbours, torch.device("cpu"))
    member = Member(replace(job, inside=place), slot)
    columns = NearColumns(neighbours, NODES[slot], job.scratch, member.device)
    host = CollectiveHost(job, ColumnMember(member, place, NODES[slot], columns))
    speaker = Speaker(host, neighbours)
    barrier.wait()
    if part == 0:
        speaker.perform(JoinGroup(1, NODES, NODES[0], transfer=False, clock=0), 0.0)
    else:
        follow(host, neighbours, 1)
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(times + 1):
        for own, found in zip((True, False), seconds):
            barrier.wait()
            started = time.perf_counter()
            if own and part > 0:
                follow(host, neighbours, STEPS)
            else:
                for each in range(STEPS):
                    speaker.perform(_step(job, slot, each), 0.0) if own else bare(each)
            barrier.wait()
            if number > 0:
                found.append((time.perf_counter() - started) / STEPS)
    if slot == part == 0:
        results.put(seconds)
    barrier.wait()
    os._exit(0)


def _step(job: Job, slot: int, number: int) -> Step:
    size = job.task.batch_size
    start = (REPLICAS * number + slot) % parts.BATCHES * size
    return Step(number + 1, 0, start, start + size, REPLICAS * size)


def _bare(
    given: squall.Task, starts: tuple[int, ...], neighbours: Neighbours, column: Group, slot: int
) -> parts.Step:  # fmt: skip
    compute, own = parts.bare_step(given, starts, neighbours)
    move = torch.optim.SGD(own.parameters(), lr=parts.LR)
    parameters: list[nn.Parameter] = [*own.parameters()]

    def step(number: int) -> None:
        compute(REPLICAS * number + slot)
        gradients: list[Any] = [local(p.grad) for p in parameters]
        flat = torch._utils._flatten_dense_tensors(gradients)
        dist.all_reduce(flat, group=column.torch)
        flat /= REPLICAS
        for gradient, summed in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients)):
            gradient.copy_(summed)
        move.step()

    return step


if __name__ == "__main__":
    print(measure().markdown())
