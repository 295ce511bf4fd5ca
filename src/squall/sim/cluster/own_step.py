"""How long a step of a task takes here and now, and what its parts take of it, for a cluster that does not say it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from squall.launchers.inline import own_host
from squall.protocol.effects import Compute, End, UseWeights
from squall.protocol.events import GradientComputed
from squall.protocol.nodes import Node
from squall.runtime.job import private_job
from squall.runtime.run_plan import Plan
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.split_step import SplitStep
from squall.strategies import SingleProcess
from squall.task import Task
from squall.vector import Layout

TIMED_STEPS, TIMED_S = 8, 2.0  # at most, but two steps


def own_step_s(plan: Plan, task: Task, layout: Layout) -> float:
    """Median seconds of a batch's gradient, with the plan's threads."""
    size = task.batch_size
    with threads(plan.threads):
        host = own_host(private_job(plan, SingleProcess(), task, layout, Path()), Node("replica", 0))
        host.perform(UseWeights(0), 0.0)
        times: list[float] = []
        while len(times) < TIMED_STEPS and (len(times) < 2 or sum(times) < TIMED_S):
            start = len(times) * size % max(1, task.examples - size + 1)
            stop = min(start + size, task.examples)
            event = host.perform(Compute(0, start, stop, 0, accumulate=False, local_step=False), 0.0)
            assert isinstance(event, GradientComputed)
            times.append(event.seconds)
        host.perform(End("finished"), 0.0)
    return statistics.median(times[1:])


def split_of(cluster: Cluster, task: Task, parts: int, torch_threads: int) -> SplitStep | None:
    """What a batch is to the parts of a replica; None of one part. Raises `ValueError` where none fits."""
    if parts == 1:
        return None
    if cluster.split is None:
        from squall.sim.cluster.own_split import own_split  # which imports torch's compiler

        with threads(torch_threads):
            return own_split(task, parts)
    if cluster.split.parts != parts:
        raise ValueError(
            f"parts is {parts}, and the cluster's [parts] has {cluster.split.parts}: give as many, or leave the table"
            " out, and the task's split is measured here"
        )
    return cluster.split


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch have so many threads in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
