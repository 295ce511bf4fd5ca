"""How fast clusters are simulated without gradients, and how much memory a node takes.

Downpour with 4 shards; every replica has a machine, whose step times vary, and an interface. All frames count as
messages, also those of joining, leases and reports.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
from multiprocessing.connection import Connection

import torch
from torch.utils.data import TensorDataset

import squall
from benchmarks.results import Section
from squall.sim.cluster.forecast import Forecast
from squall.sim.cluster.jitter import LogNormal
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.parts import MachineKind
from squall.sim.cluster.simulate import simulate

BATCH = 4
FEW, MANY = 20, 10_000  # replicas
STEPS, SHARDS = 100, 4


def measure(repeats: int = 5) -> Section:
    print("simulation", flush=True)
    section = Section(
        "Simulation",
        f"One core, no gradients: Downpour with {SHARDS} shards, {STEPS} steps of each replica (20 times as many of 20"
        " replicas), each on a machine of its own with log-normal step times. Seconds are of the fastest of three.",
    )
    rates = []
    for _ in range(repeats):
        found, _ = _apart(FEW, 20 * STEPS)
        rates.append(found.messages / found.wall_s)
        print(f"  {FEW} replicas: {rates[-1]:,.0f} messages/s", flush=True)
    section.rate(f"{FEW} replicas", statistics.median(rates), 150_000, "messages/s")
    kib = {}
    for replicas in (MANY // 10, MANY):
        # The fastest of three: whoever shares the memory with this process can only make it slower.
        runs = [_apart(replicas, STEPS) for _ in range(3)]
        found, kib[replicas] = min((run[0] for run in runs), key=lambda run: run.wall_s), max(run[1] for run in runs)
        print(f"  {replicas} replicas: {found.wall_s:.1f} s, {found.messages:,} messages, {kib[replicas]:.1f} KiB each")
        what = f"{replicas:,} replicas, {found.messages:,} messages"
        if replicas == MANY:
            section.below(what, f"{found.wall_s:.1f} s", found.wall_s, 60, "s")
        else:
            section.only(what, f"{found.wall_s:.1f} s")
    figures = [f"{value:.1f} KiB a replica" for value in kib.values()]
    section.at_most(f"memory of {MANY:,} replicas", figures[1], figures[0], kib[MANY] / kib[MANY // 10], 1.2)
    return section


def _apart(replicas: int, steps: int) -> tuple[Forecast, float]:
    """In a process of its own: what came out, and KiB that it took for each replica."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_simulate, args=(replicas, steps, theirs))
    process.start()
    theirs.close()
    found: tuple[Forecast, float] = mine.recv()
    process.join()
    return found


def _simulate(replicas: int, steps: int, line: Connection) -> None:
    torch.set_num_threads(1)
    data = TensorDataset(torch.zeros(1, 100).expand(BATCH * steps * replicas, -1))

    def task() -> squall.Task:
        return squall.Task(
            model=torch.nn.Linear(100, 10), loss=lambda m, b: m(b[0]).sum(), train=data, batch_size=BATCH
        )  # fmt: skip

    machines = (
        MachineKind(name="worker", count=replicas, step_s=0.01, jitter=LogNormal(0.2), roles=("replica",)),
        MachineKind(name="server", count=SHARDS, cores=2, roles=("shard", "coordinator", "evaluator")),
    )
    settings = squall.Settings(snapshot_every_s=None)
    strategy = squall.Downpour(replicas=replicas, shards=SHARDS)
    simulate(task, squall.Downpour(), Cluster(machines=machines), gradients="none", steps=10, settings=settings)
    memory = _Memory()
    before = peak = memory.kib()

    def watch(now: float) -> None:
        nonlocal peak
        peak = max(peak, memory.kib())

    found = simulate(
        task, strategy, Cluster(machines=machines), gradients="none", epochs=1, settings=settings, watch=watch
    )  # fmt: skip
    line.send((found, (peak - before) / replicas))


class _Memory:
    """What this process keeps in memory, read in two microseconds: it is asked all the time."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY)

    def kib(self) -> float:
        pages = int(os.pread(self._file, 100, 0).split()[1])
        return pages * resource.getpagesize() / 1024


if __name__ == "__main__":
    print(measure().markdown())
