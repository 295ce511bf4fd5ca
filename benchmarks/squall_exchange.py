"""Squall's own side of the exchange benchmark: the shipping processes, with a replica that computes nothing.

The coordinator and the shard are forked and run what they run in a real training. The replica is the real machine
behind the real transport; only its host differs, whose gradient is ready at once. What is timed is therefore a whole
exchange: doorbell, the shard's optimizer on the gradient where it lies, the copy into the replica's buffer, doorbell.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

import squall
from benchmarks.peers.common import EXCHANGE_LR, OptimizerName
from squall.launchers.backups import prepare
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.role_processes import SPIN_S, run_role
from squall.plan import make_plan
from squall.protocol.effects import Compute, Effect
from squall.protocol.events import Event, GradientComputed
from squall.protocol.nodes import COORDINATOR, Node
from squall.runtime import attempts
from squall.runtime.arena import Arena
from squall.runtime.driver import Driver, Host
from squall.runtime.job import Job, arena_shape, initial_vector
from squall.runtime.kinds import machine
from squall.runtime.machines import with_legacies
from squall.runtime.processes import die_with_parent
from squall.runtime.recording import recorded
from squall.runtime.run_plan import Aims
from squall.transports.host import HostTransport
from squall.vector import Layout

REPLICA, SHARD, BACKUP = Node("replica", 0), Node("shard", 0), Node("backup", 0)
WARM_UP = 5


class _Vector(nn.Module):
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(elements))


class ReadyGradient(Host):
    """A replica's host whose gradient is always there; notes when each exchange began."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, Compute):
            self.began.append(time.perf_counter())
            return GradientComputed(0.0, True, 0.0)
        return None

    @property
    def median_seconds(self) -> float:
        """From one exchange to the next."""
        times = [after - before for before, after in zip(self.began, self.began[1:])]
        return statistics.median(times[max(WARM_UP, len(times) // 2) :])  # by then there is a backup, if there is any


def exchange_job(
    elements: int, strategy: squall.Strategy, repeats: int, shard_threads: int, directory: Path, copies: int = 1
) -> Job:  # fmt: skip
    """A run in which each replica exchanges `repeats` times after the warm-up."""
    replicas = strategy.recipe().replicas
    data = torch.utils.data.TensorDataset(torch.zeros((repeats + WARM_UP + 1) * replicas))
    task = squall.Task(
        model=_Vector(elements), loss=lambda model, batch: cast(Tensor, model(batch)), train=data, batch_size=1
    )
    settings = squall.Settings(
        threads=1, shard_threads=shard_threads, snapshot_every_s=None, progress=False, copies=copies
    )
    plan = make_plan(strategy, settings, Aims(epochs=1))
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    arena = Arena.create(arena_shape(layout, strategy.recipe()), directory)
    for slot in range(replicas):
        arena.gradient(slot, 0).normal_()
    return Job(
        plan=plan, strategy=strategy, task=task, layout=layout, arena=arena, initial=initial_vector(layout, task),
        directory=directory, commanded_at=time.time(), scratch=directory,
    )  # fmt: skip


def strategy(optimizer: OptimizerName, replicas: int = 1, shards: int = 1, overlap: bool = False) -> squall.Strategy:
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adagrad
    made = partial(kind, lr=EXCHANGE_LR)
    return squall.Downpour(replicas=replicas, shards=shards, overlap=overlap, optimizer=made)


def exchange_seconds(
    elements: int, optimizer: OptimizerName, repeats: int, scheduled: bool = False, shard_threads: int = 1,
    succeeded: bool = True, copied: bool = False,
) -> float:  # fmt: skip
    """Median seconds of one exchange with a real shard process.

    `scheduled`: with the schedule of both ends kept; `succeeded`: with what the shard leaves to a successor; `copied`:
    the shard has a backup beside it.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder:
        job = exchange_job(elements, strategy(optimizer), repeats, shard_threads, Path(folder), 1 + copied)
        job = attempts.begin(job) if scheduled else job
        job = with_legacies(job) if succeeded else job
        job = prepare(job, BACKUP, None, [SHARD]) if copied else job
        children = [_fork(job, node) for node in (COORDINATOR, SHARD, *([BACKUP] if copied else []))]
        host = ReadyGradient()
        transport = HostTransport(REPLICA, Path(folder), peers=[COORDINATOR, SHARD], spin_s=SPIN_S)
        try:
            Driver(machine(job, REPLICA), transport, recorded(host, job, REPLICA)).run()
        finally:
            transport.close()
            for child in children:
                os.waitpid(child, 0)
    return host.median_seconds


def _fork(job: Job, node: Node) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        die_with_parent(parent)
        mine, _ = Pipe()
        run_role(job, node, job.directory, ControlPipe(mine) if node == COORDINATOR else None)
    finally:
        os._exit(0)


if __name__ == "__main__":
    for count in (1_000, 1_000_000, 10_000_000):
        print(
            count, [f"{exchange_seconds(count, 'sgd', 2000 if count < 10_000 else 30) * 1e3:.3f} ms" for _ in range(3)]
        )
