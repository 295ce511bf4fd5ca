"""The time of a round of all-reduce: of the task's own, or of a model that computes nothing, against its size.

The coordinator and two replicas are forked and run what they run in a training. The first replica is held between two
moments, and the other one waits for it in the group; where that is too long they form another one, which is not timed.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.role_processes import SPIN_S, make_host, run_role
from squall.protocol.effects import Effect, Step
from squall.protocol.events import Event
from squall.protocol.nodes import COORDINATOR, Node
from squall.runtime.collective.process import import_beforehand
from squall.runtime.driver import Driver, Host, HostAround
from squall.runtime.job import Job
from squall.runtime.kinds import machine
from squall.runtime.processes import keep_freed_memory
from squall.sim.cluster.forks import forked
from squall.sim.cluster.measure_run import endless_job
from squall.sim.cluster.quiet import Chunks, Enough, Timed, calmest, moment, times_of
from squall.strategies import AllReduce
from squall.task import OptimizerFactory, Task
from squall.transports.host import HostTransport
from squall.vector import Layout

WARM_UP, FEWEST = 1, 2  # rounds of a moment
MOMENTS = 4
ROUND_BYTES = 64  # an element: of each replica weights, gradient, bucket, optimizer state and their temporaries
FIRST, SECOND = Node("replica", 0), Node("replica", 1)


def able() -> bool:
    """Whether this torch has what all-reduce needs on the CPU."""
    return dist.is_available()


def empty_round_s(elements: int, optimizer: OptimizerFactory, seconds: float) -> float:
    """Seconds of a round of two replicas whose gradients, of so many elements, are ready at once.

    Measured for about `seconds`. What a round takes varies from one to the next by several times, in a run as here: of
    moments the median, in each the mean.
    """
    data = TensorDataset(torch.zeros(1000))
    model, gradient = nn.ParameterList([torch.zeros(elements)]), torch.zeros(elements)
    task = Task(model=model, loss=partial(_ready, gradient), train=data, batch_size=1)
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    with rounds(task, layout, optimizer, 1) as timed:
        turns = [[timed(seconds / MOMENTS)] for _ in range(MOMENTS)]
    return statistics.median(statistics.fmean(times_of(turn)) for turn in calmest(turns))


@contextmanager
def rounds(task: Task, layout: Layout, optimizer: OptimizerFactory, threads: int) -> Iterator[Timed]:
    """A run of two replicas; a moment says the `times` of its rounds."""
    import_beforehand()
    with tempfile.TemporaryDirectory(prefix="squall-measure-") as folder:
        job = endless_job(task, layout, AllReduce(replicas=2, optimizer=optimizer), threads, folder)
        job = dataclasses.replace(job, scratch=Path(folder))
        with forked([partial(_serve, job), partial(_fellow, job), partial(_first, job)]) as lines:
            yield lambda seconds: moment(lines[2:], seconds, beside=lines[:2])


class _Ready(torch.autograd.Function):
    """A loss whose gradient costs nothing."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


def _ready(gradient: Tensor, model: nn.ParameterList, batch: object) -> Tensor:
    loss: Tensor = _Ready.apply(model[0], gradient)  # type: ignore[no-untyped-call]
    return loss


def _serve(job: Job, line: ControlPipe) -> None:
    mine, theirs = Pipe()  # where a run's coordinator hears its nursery: `theirs` stays open, and says nothing
    run_role(job, COORDINATOR, job.directory, ControlPipe(mine))
    theirs.close()


def _fellow(job: Job, line: ControlPipe) -> None:
    run_role(job, SECOND, job.directory, None)


def _first(job: Job, line: ControlPipe) -> None:
    torch.set_num_threads(job.plan.threads)
    keep_freed_memory()
    chunks = Chunks(line)
    with suppress(Enough):
        chunks.begin()
        transport = HostTransport(FIRST, job.directory, peers=[COORDINATOR], spin_s=SPIN_S)
        Driver(machine(job, FIRST), transport, _Timed(make_host(job, FIRST), chunks)).run()


class _Timed(HostAround):
    """A replica's host that tells how long rounds took, from one step to the next."""

    def __init__(self, host: Host, chunks: Chunks) -> None:
        super().__init__(host)
        self._chunks = chunks
        self._began: list[float] = []

    def perform(self, effect: Effect, now: float) -> Event | None:
        if type(effect) is Step:
            self._began.append(time.perf_counter())
            if len(self._began) > WARM_UP + FEWEST and self._chunks.over():
                times = [after - before for before, after in pairwise(self._began)]
                self._chunks.next(times=times[WARM_UP:])
                self._began = []
        return self._host.perform(effect, now)
