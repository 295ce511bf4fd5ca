"""What a run's own code takes of the cores, beside gradients and passes over vectors: measured in runs of the task.

For a network whose step is a fraction of a millisecond that is most of the time. Nobody looks out for an answer in
these runs, so that the cores' time is that of work.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing import Pipe
from pathlib import Path

import torch
from torch import Tensor, nn

from squall.launchers.inline import LoneChannel
from squall.launchers.line import Line
from squall.launchers.roles import make_host
from squall.plan import Settings, make_plan
from squall.protocol.core import COORDINATOR, Compute, Effect, Event, Expect, Node
from squall.runtime import attempts
from squall.runtime.arena import Arena
from squall.runtime.driver import Driver, Host
from squall.runtime.job import Job, arena_shape, private_job
from squall.runtime.machines import machine
from squall.runtime.processes import keep_freed_memory
from squall.runtime.sequential import Sequential
from squall.sim.cluster.forks import Work, answer, forked
from squall.sim.cluster.model import Overhead
from squall.sim.cluster.quiet import Chunks, Enough, Moment, Stopwatch, calmest, core_s, moment
from squall.strategies import Downpour, SingleProcess, Strategy
from squall.task import Batch, OptimizerFactory, Task
from squall.transports.host import HostTransport
from squall.vector import Layout

REPLICA, SHARD = Node("replica", 0), Node("shard", 0)
SELDOM = 16  # batches between exchanges, in a run that shows what the others take
WARM_UP_S, CHUNK_S = 0.2, 0.1
ENDLESS = 10**9  # epochs


def overhead_of(
    task: Task, layout: Layout, optimizer: OptimizerFactory, threads: int, seconds: float
) -> Overhead:  # fmt: skip
    """Measured for about so long, in a run that exchanges after each batch and in one that seldom does."""

    def run(every: int) -> list[Moment]:
        strategy = Downpour(replicas=1, optimizer=optimizer, push_every=every, fetch_every=every)
        return _chunks(_job(task, layout, strategy, threads), seconds / 2)

    often, seldom = run(1), run(SELDOM)
    every, between = _median(often, "replica_s", "batches"), _median(seldom, "replica_s", "batches")
    exchange_s = max(0.0, (every - between) / (1 - 1 / SELDOM))
    return Overhead(
        batch_s=max(0.0, every - exchange_s), exchange_s=exchange_s, serve_s=_median(often, "shard_s", "batches"),
        lease_s=_median(often, "coordinator_s", "leases"),
    )  # fmt: skip


def single_s(task: Task, layout: Layout, optimizer: OptimizerFactory, threads: int, seconds: float) -> float:
    """Seconds of a batch of `SingleProcess`, everything included."""
    job = _job(task, layout, SingleProcess(optimizer=optimizer), threads)
    folder = tempfile.TemporaryDirectory(prefix="squall-measure-")
    with folder, forked([partial(_alone, job, folder.name)]) as lines:
        return _median(_moments(lines, lines, (), seconds), "seconds", "batches")


def _median(moments: Sequence[Moment], what: str, by: str) -> float:
    """Of what a batch or a lease took, over the moments that count."""
    said: list[dict[str, float]] = [moment.said[0] for moment in calmest(moments)]
    return statistics.median([each[what] / each[by] for each in said if each[by]] or [0.0])


def _job(task: Task, layout: Layout, strategy: Strategy, threads: int) -> Job:
    """Without a directory yet, and without evaluations."""
    settings = Settings(threads=threads, snapshot_every_s=None, progress=False)
    plan = make_plan(strategy, settings, epochs=ENDLESS, steps=None, until=None, seed=0, device="cpu")
    return private_job(plan, strategy, dataclasses.replace(task, validate=None), layout, Path(), time.time())


def _moments(
    measuring: Sequence[Line], lines: Sequence[Line], servers: Sequence[tuple[str, int]], seconds: float
) -> list[Moment]:  # fmt: skip
    """Chunk after chunk; each says as well what the servers (name and process) had of the cores in it."""
    beside = [line for line in lines if line not in measuring]
    moment(measuring, WARM_UP_S, beside)
    found: list[Moment] = []
    until = time.monotonic() + seconds
    while not found or time.monotonic() < until:
        before = [core_s(pid) for _, pid in servers]
        found.append(moment(measuring, CHUNK_S, beside))
        for (name, pid), had_s in zip(servers, before):
            found[-1].said[0][name] = core_s(pid) - had_s
    return found


# ---------------------------------------------------------------- a run of processes


def _chunks(job: Job, seconds: float) -> list[Moment]:
    with tempfile.TemporaryDirectory(prefix="squall-measure-") as folder:
        arena = Arena.create(arena_shape(job.layout, job.recipe), Path(folder))
        job = attempts.begin(dataclasses.replace(job, arena=arena, directory=Path(folder)))
        works: list[Work] = [partial(_serve, job, COORDINATOR), partial(_serve, job, SHARD), partial(_replica, job)]
        with forked(works) as lines:
            pids = [answer(line)["pid"] for line in lines[:2]]
            return _moments(lines[2:], lines, list(zip(("coordinator_s", "shard_s"), pids)), seconds)


def _serve(job: Job, node: Node, line: Line) -> None:
    torch.set_num_threads(1)
    line.say(pid=os.getpid())
    mine, theirs = Pipe()  # where a run's coordinator hears its nursery: `theirs` stays open, and says nothing
    peers = [] if node == COORDINATOR else [COORDINATOR]
    transport = HostTransport(node, job.directory, serve=True, peers=peers, wake_on=mine.fileno())
    Driver(machine(job, node), transport, make_host(job, node, Line(mine))).run()
    theirs.close()


def _replica(job: Job, line: Line) -> None:
    torch.set_num_threads(job.plan.threads)
    keep_freed_memory()
    transport = HostTransport(REPLICA, job.directory, peers=[COORDINATOR, SHARD])
    chunks = Chunks(line)
    try:
        chunks.begin()
        Driver(machine(job, REPLICA), transport, _Metered(make_host(job, REPLICA, None), chunks)).run()
    except Enough:
        pass


class _Metered:
    """A replica's host; tells what its process had of a core beside its computations."""

    def __init__(self, host: Host, chunks: Chunks) -> None:
        self._host = host
        self._chunks = chunks
        self.attach, self.poll, self.rest = host.attach, host.poll, host.rest
        self._batches = self._leases = 0
        self._computed_s = self._began_s = 0.0
        self._granted = False

    def perform(self, effect: Effect, now: float) -> Event | None:
        if type(effect) is Expect and not self._granted:  # the first of a lease's batches
            self._granted = True
            self._leases += 1
        if type(effect) is not Compute:
            return self._host.perform(effect, now)
        self._granted = False
        if self._chunks.over():
            others_s = time.thread_time() - self._began_s - self._computed_s
            self._chunks.next(batches=self._batches, leases=self._leases, replica_s=others_s)
            self._batches = self._leases = 0
            self._computed_s, self._began_s = 0.0, time.thread_time()
        self._batches += 1
        began_s = time.thread_time()
        event = self._host.perform(effect, now)
        self._computed_s += time.thread_time() - began_s
        return event


# ---------------------------------------------------------------- one process


def _alone(job: Job, folder: str, line: Line) -> None:
    torch.set_num_threads(job.plan.threads)
    chunks, watch, batches, loss = Chunks(line), Stopwatch(job.plan.threads), 0, job.task.loss

    def metered(model: nn.Module, batch: Batch) -> Tensor:  # of each batch
        nonlocal batches
        if chunks.over():
            chunks.next(batches=batches, seconds=watch.seconds())
            batches = 0
            watch.restart()
        batches += 1
        return loss(model, batch)

    job = dataclasses.replace(job, task=dataclasses.replace(job.task, loss=metered), directory=Path(folder))
    try:
        chunks.begin()
        Sequential(attempts.begin(job), LoneChannel()).run()
    except Enough:
        pass
