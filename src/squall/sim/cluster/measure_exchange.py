"""The time of an exchange against its size: push, apply, fetch, through the processes that a run has.

The coordinator and the shard are forked and run what they run in a training. The replica is the real machine behind
the real transport; only its host differs, whose gradient is ready at once.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import suppress
from functools import partial
from itertools import pairwise
from multiprocessing import Pipe
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.role_processes import SPIN_S, run_role
from squall.protocol.effects import Compute, Effect
from squall.protocol.events import Event, GradientComputed
from squall.protocol.nodes import COORDINATOR, Node
from squall.runtime.driver import Driver, Host
from squall.runtime.job import Job
from squall.runtime.kinds import machine
from squall.sim.cluster.forks import forked
from squall.sim.cluster.measure_run import REPLICA, SHARD, endless_job
from squall.sim.cluster.quiet import Chunks, Enough, calmest, moment
from squall.strategies import Downpour
from squall.task import OptimizerFactory, Task
from squall.transports.host import HostTransport
from squall.vector import Layout

WARM_UP, FEWEST = 5, 5  # exchanges
MOMENTS = 4
BYTES = 40  # an element: three buffers of the arena, a shard's weights and optimizer state, and their temporaries


def exchange_seconds(elements: int, optimizer: OptimizerFactory, seconds: float) -> float:
    """Median seconds of an exchange of one shard of so many elements; measured for about `seconds`."""
    data = TensorDataset(torch.zeros(1000))  # an exchange each
    model = nn.ParameterList([torch.zeros(elements)])
    task = Task(model=model, loss=lambda model, batch: cast(Tensor, model(batch)), train=data, batch_size=1)
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    with tempfile.TemporaryDirectory(prefix="squall-measure-") as folder:
        job = endless_job(task, layout, Downpour(replicas=1, optimizer=optimizer), 1, folder)
        job.arena.gradient(0, 0).normal_()
        works = [partial(_serve, job, COORDINATOR), partial(_serve, job, SHARD), partial(_replica, job)]
        with forked(works) as lines:
            turns = [[moment(lines[2:], seconds / MOMENTS, beside=lines[:2])] for _ in range(MOMENTS)]
    times: list[float] = [time for (each,) in calmest(turns) for time in each.said[0]["times"]]
    return statistics.median(times)


def _serve(job: Job, node: Node, line: ControlPipe) -> None:
    mine, theirs = Pipe()  # where a run's coordinator hears its nursery: `theirs` stays open, and says nothing
    run_role(job, node, job.directory, ControlPipe(mine) if node == COORDINATOR else None)
    theirs.close()


class _ReadyGradient(Host):
    """A replica's host whose gradient is always there; tells how long exchanges took."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._began: list[float] = []

    def perform(self, effect: Effect, now: float) -> Event | None:
        if not isinstance(effect, Compute):
            return None
        self._began.append(time.perf_counter())
        if len(self._began) > WARM_UP + FEWEST and self._chunks.over():
            times = [after - before for before, after in pairwise(self._began)]
            self._chunks.next(times=times[WARM_UP:])
            self._began = []
        return GradientComputed(0.0, True, 0.0)


def _replica(job: Job, line: ControlPipe) -> None:
    torch.set_num_threads(1)
    transport = HostTransport(REPLICA, job.directory, peers=[COORDINATOR, SHARD], spin_s=SPIN_S)
    chunks = Chunks(line)
    with suppress(Enough):
        chunks.begin()
        Driver(machine(job, REPLICA), transport, _ReadyGradient(chunks)).run()
