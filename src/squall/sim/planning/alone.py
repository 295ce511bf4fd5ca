"""One process as a simulation knows it: a replica whose exchanges take no time, on a machine where nothing else runs.

It equals one replica of any strategy bit for bit, so what an example teaches it is simulated as well. How long a batch
takes was measured (`single` of a cluster file), or is a step and an update.
"""

from __future__ import annotations

import dataclasses

from squall.sim.cluster.costs import UPDATE_SHARE
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.parts import Link, MachineKind, Overhead
from squall.strategies import Downpour, Strategy

NO_TIME = ((10**12, 1e-9),)  # of an exchange, whatever its size
CORES = 4  # a replica, a shard, the coordinator and the evaluator: nobody keeps another from a core


def stand_in(strategy: Strategy, cluster: Cluster, elements: int) -> tuple[Strategy, Cluster]:
    """What to simulate in place of a strategy that has no shards, and on which cluster; others as they are.

    It runs on the fastest machine. A failure there has it begin again from its last snapshot.
    """
    if not strategy.recipe().alone:
        return strategy, cluster
    able = [kind for kind in cluster.machines if "replica" in kind.roles]
    kind = min(able, key=lambda kind: single_s(kind, cluster, elements))
    machine = dataclasses.replace(
        kind, count=1, cores=CORES, step_s=single_s(kind, cluster, elements), slowdown=(), exchange=NO_TIME,
        overhead=Overhead(), roles=MachineKind(name="").roles,
    )  # fmt: skip
    law = cluster.failures.get("replica")
    failures = {"coordinator": dataclasses.replace(law, fatal=True)} if law is not None else {}
    preemptions = [dataclasses.replace(each, count=1) for each in cluster.preemptions if each.machine == kind.name]
    here = Link(latency_s=0.0)
    alone = dataclasses.replace(
        cluster, machines=(machine,), between=here, within=here, failures=failures, preemptions=tuple(preemptions)
    )
    return Downpour(replicas=1, optimizer=strategy.recipe().loop.update.optimizer), alone


def single_s(kind: MachineKind, cluster: Cluster, elements: int) -> float:
    """Seconds of a batch."""
    if kind.single_s is not None:
        return kind.single_s
    return cluster.step_s(kind) + kind.overhead.batch_s + UPDATE_SHARE * kind.work_s(elements)
