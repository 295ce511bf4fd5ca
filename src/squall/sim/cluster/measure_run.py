"""What a run's own code takes of the cores, beside gradients and passes over vectors: measured in runs of the task.

For a network whose step is a fraction of a millisecond that is most of the time. The time for which a process looks
out for answers is not counted.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from squall.launchers.alone import LoneRun
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.inline import LoneChannel
from squall.launchers.nursery_channel import NurseryChannel
from squall.launchers.role_processes import SPIN_S, make_host
from squall.plan import make_plan
from squall.protocol.effects import Apply, Compute, Effect, Expect
from squall.protocol.events import Event
from squall.protocol.nodes import COORDINATOR, Node
from squall.runtime import attempts
from squall.runtime.arena import Arena
from squall.runtime.driver import Driver, Host, HostAround
from squall.runtime.job import Job, arena_shape, initial_vector
from squall.runtime.kinds import machine
from squall.runtime.processes import keep_freed_memory
from squall.runtime.run_plan import Aims
from squall.settings import Settings
from squall.sim.cluster.forks import ForkedWork, answer, forked
from squall.sim.cluster.measure_steps import rounded
from squall.sim.cluster.parts import Overhead
from squall.sim.cluster.quiet import Chunks, Enough, Moment, Stopwatch, Timed, Turn, core_s, moment
from squall.strategies import Downpour, SingleProcess, Strategy, Synchronous
from squall.task import Batch, OptimizerFactory, Task
from squall.transports.host import HostTransport
from squall.vector import Layout

REPLICA, SHARD = Node("replica", 0), Node("shard", 0)
RUNS = 4
SELDOM = 16  # batches between exchanges, in a run that shows what the others take
WARM_UP_S = 0.2
MOST_UPDATES = 1 << 14  # the newest
ENDLESS = 10**9  # epochs


@contextmanager
def running(task: Task, layout: Layout, optimizer: OptimizerFactory, threads: int) -> Iterator[list[Timed]]:
    """Four runs, to be measured in turns: what each says becomes an `Overhead` in `overhead_of`.

    Three exchange after each batch: in the first the shard sleeps between pushes, in the second it looks out for them
    all the time, as it does where cores are free, and in the third each batch is a round, and a lease of its own. The
    last seldom exchanges.
    """
    often = Downpour(replicas=1, optimizer=optimizer)
    spin_s = SPIN_S if len(os.sched_getaffinity(0)) > threads else 0.0
    runs: list[tuple[Strategy, float]] = [
        (often, 0.0), (often, spin_s), (Synchronous(replicas=1, optimizer=optimizer), 0.0),
        (dataclasses.replace(often, push_every=SELDOM, fetch_every=SELDOM), 0.0),
    ]  # fmt: skip
    with ExitStack() as stack:
        yield [stack.enter_context(_run(task, layout, each, threads, spins_s)) for each, spins_s in runs]


def overhead_of(turns: Sequence[Turn], work_s: float) -> Overhead:
    """From turns of a step alone and of those four runs.

    Of the batches in a turn the mean counts, as it does of steps; of a shard's updates, whose caches other programs
    empty, the median; and of all turns the median. `work_s` is the time of a shard's passes over its elements, which
    counts as the exchange's. Adding up the gradients of several batches is none of a batch's own code: with a large
    vector it takes longer than all that a replica does for an exchange, which is therefore the most that is counted.
    The coordinator sleeps for a lease of many batches, and hardly at all where each batch is a round.
    """
    found = []
    for alone, *runs in turns:
        step_s = fmean(alone.said[0]["times"])
        asleep, awake, rounds, seldom = (run.said[0] for run in runs)
        both_s = max(0.0, awake["replica"] - step_s)
        batch_s = min(both_s, max(0.0, seldom["replica"] - step_s))
        woken_s = max(0.0, asleep["replica"] + asleep["shard"] - awake["replica"] - awake["shard"])
        serve_s = max(0.0, awake["shard"] - work_s)
        cold_s = max(0.0, asleep["coordinator"] - rounds["coordinator"])
        lease_s = rounds["coordinator"] + max(0.0, rounds["replica"] - asleep["replica"])
        found.append((batch_s, both_s - batch_s, serve_s, lease_s, woken_s, cold_s))
    names = ("batch_s", "exchange_s", "serve_s", "lease_s", "wake_s", "cold_s")
    return Overhead(**{name: rounded(median(seconds)) for name, seconds in zip(names, zip(*found))})


@contextmanager
def single(task: Task, layout: Layout, optimizer: OptimizerFactory, threads: int) -> Iterator[Timed]:
    """A run of `SingleProcess`, everything included; a moment says the mean as the one of its `times`."""
    with tempfile.TemporaryDirectory(prefix="squall-measure-") as folder:
        job = endless_job(task, layout, SingleProcess(optimizer=optimizer), threads, folder)
        with forked([partial(_alone, job)]) as lines:
            moment(lines, WARM_UP_S)
            yield partial(moment, lines)


def endless_job(task: Task, layout: Layout, strategy: Strategy, threads: int, folder: str) -> Job:
    """A job for forked processes that does not end by itself, and without evaluations."""
    shape = arena_shape(layout, strategy.recipe())
    settings = Settings(threads=threads, snapshot_every_s=None, progress=False)
    return Job(
        plan=make_plan(strategy, settings, Aims(epochs=ENDLESS)), strategy=strategy,
        task=dataclasses.replace(task, validate=None), layout=layout,
        arena=Arena.private(shape) if strategy.recipe().alone else Arena.create(shape, Path(folder)),
        initial=initial_vector(layout, task), directory=Path(folder),
    )  # fmt: skip


# ---------------------------------------------------------------- a run of processes


@contextmanager
def _run(task: Task, layout: Layout, strategy: Strategy, threads: int, spin_s: float) -> Iterator[Timed]:
    """A moment says seconds of a core: of a batch by the replica, an update by the shard, a lease by the coordinator.

    `spin_s`: for which the shard looks out for a push before it sleeps.
    """
    served = torch.zeros(MOST_UPDATES, dtype=torch.float64).share_memory_()  # by the shard, which nobody can ask
    with tempfile.TemporaryDirectory(prefix="squall-measure-") as folder:
        job = attempts.begin(endless_job(task, layout, strategy, threads, folder))
        works: list[ForkedWork] = [
            partial(_serve, job, COORDINATOR, served, 0.0), partial(_serve, job, SHARD, served, spin_s),
            partial(_replica, job),
        ]  # fmt: skip
        with forked(works) as lines:
            coordinator = answer(lines[0])["pid"]
            answer(lines[1])
            moment(lines[2:], WARM_UP_S, lines[:2])

            def timed(seconds: float) -> Moment:
                served.zero_()
                before_s, leases, batches, others = core_s(coordinator), 0, [], []
                while not leases:
                    share, (said,) = moment(lines[2:], seconds, lines[:2])
                    leases += said["leases"]
                    batches += said["batches"]
                    others.append(share)
                lease_s = (core_s(coordinator) - before_s) / leases
                updates_s = served[served > 0].tolist() or [0.0]
                figures = {"replica": fmean(batches), "shard": median(updates_s), "coordinator": lease_s}
                return Moment(fmean(others), [figures])

            yield timed


def _serve(job: Job, node: Node, served: Tensor, spin_s: float, line: ControlPipe) -> None:
    torch.set_num_threads(1)
    line.say(pid=os.getpid())
    mine, theirs = Pipe()  # where a run's coordinator hears its nursery: `theirs` stays open, and says nothing
    peers = [] if node == COORDINATOR else [COORDINATOR]
    transport = _Awaited(
        HostTransport(node, job.directory, serve=True, peers=peers, wake_on=[mine.fileno()], spin_s=spin_s)
    )
    channel = NurseryChannel(ControlPipe(mine)) if node == COORDINATOR else None
    host = make_host(job, node, channel)
    metered = host if node == COORDINATOR else _MeteredShard(host, served, transport)
    Driver(machine(job, node), transport, metered, carriers=[channel] if channel is not None else ()).run()
    theirs.close()


def _replica(job: Job, line: ControlPipe) -> None:
    torch.set_num_threads(job.plan.threads)
    keep_freed_memory()
    transport = _Awaited(HostTransport(REPLICA, job.directory, peers=[COORDINATOR, SHARD], spin_s=SPIN_S))
    chunks = Chunks(line)
    with suppress(Enough):
        chunks.begin()
        host = _MeteredReplica(make_host(job, REPLICA), chunks, transport)
        Driver(machine(job, REPLICA), transport, host).run()


class _Awaited:
    """A transport; adds up the time on a core for which its process looks out for messages."""

    def __init__(self, transport: HostTransport) -> None:
        self._transport = transport
        self.send = transport.send
        self.seconds = 0.0

    def receive(self, timeout_s: float | None) -> tuple[Node, bytes] | None:
        began_s = time.thread_time()
        received = self._transport.receive(timeout_s)
        self.seconds += time.thread_time() - began_s
        return received


class _Metered(HostAround, ABC):
    """A host that counts its thread's seconds on a core from one counted effect to the next, without looking out."""

    def __init__(self, host: Host, counted: type[Effect], transport: _Awaited) -> None:
        super().__init__(host)
        self._counted = counted
        self._transport = transport
        self._began_s = time.thread_time()

    def perform(self, effect: Effect, now: float) -> Event | None:
        if type(effect) is self._counted:
            self.count(time.thread_time() - self._began_s - self._transport.seconds)
            self._began_s, self._transport.seconds = time.thread_time(), 0.0
        return self._host.perform(effect, now)

    @abstractmethod
    def count(self, seconds: float) -> None:
        """So long it took from one counted effect to the next."""


class _MeteredShard(_Metered):
    def __init__(self, host: Host, served: Tensor, transport: _Awaited) -> None:
        super().__init__(host, Apply, transport)
        self._served = served
        self._updates = 0

    def count(self, seconds: float) -> None:
        self._served[self._updates % MOST_UPDATES] = seconds
        self._updates += 1


class _MeteredReplica(_Metered):
    def __init__(self, host: Host, chunks: Chunks, transport: _Awaited) -> None:
        super().__init__(host, Compute, transport)
        self._chunks = chunks
        self._batches: list[float] = []
        self._leases = 0
        self._granted = False

    def perform(self, effect: Effect, now: float) -> Event | None:
        if type(effect) is Expect and not self._granted:  # the first of a lease's batches
            self._leases += 1
        self._granted = type(effect) is Expect
        return super().perform(effect, now)

    def count(self, seconds: float) -> None:
        self._batches.append(seconds)
        if self._chunks.over():
            self._chunks.next(batches=self._batches, leases=self._leases)
            self._batches, self._leases = [], 0


# ---------------------------------------------------------------- one process


def _alone(job: Job, line: ControlPipe) -> None:
    torch.set_num_threads(job.plan.threads)
    chunks, watch, batches, loss = Chunks(line), Stopwatch(job.plan.threads), 0, job.task.loss

    def metered(model: nn.Module, batch: Batch) -> Any:  # of each batch
        nonlocal batches
        if chunks.over():
            chunks.next(times=[watch.seconds() / max(1, batches)])
            batches = 0
            watch.restart()
        batches += 1
        return loss(model, batch)

    job = dataclasses.replace(job, task=dataclasses.replace(job.task, loss=metered))
    with suppress(Enough):
        chunks.begin()
        LoneRun(attempts.begin(job), LoneChannel()).run()
