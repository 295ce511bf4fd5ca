"""`squall.simulate`: a task and a strategy on a cluster that is not there."""

from __future__ import annotations

import dataclasses
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import msgspec

from squall.attending import finish
from squall.launchers.inline import LoneChannel, own_host
from squall.plan import build_checked, make_plan, strategy_name
from squall.protocol.coordinator import Coordinator
from squall.protocol.effects import End
from squall.protocol.link import Linked
from squall.protocol.machine import Machine
from squall.protocol.nodes import COORDINATOR, NURSERY, Node
from squall.run import Run, new_directory
from squall.runtime import attempts
from squall.runtime.driver import Host
from squall.runtime.interrupts import collected_interrupts
from squall.runtime.job import Job, private_job
from squall.runtime.kinds import machine
from squall.runtime.lock import hold
from squall.runtime.machines import nodes
from squall.runtime.processes import may_open
from squall.runtime.recorder import CoordinatorHost
from squall.runtime.run_plan import Aims, Plan
from squall.runtime.seeds import chance_kept
from squall.runtime.snapshot import Manifest, Restored, Snapshots
from squall.runtime.world import World
from squall.runtime.world_nodes import Premises
from squall.settings import Settings
from squall.sim.cluster.costs import Costs, Workload
from squall.sim.cluster.forecast import Forecast, NotesWatch, Sums
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.own_step import own_step_s, split_of, threads
from squall.sim.cluster.placement import Placement
from squall.sim.cluster.rehearsal import MakeMember, Rehearsal
from squall.sim.cluster.ring import Ring
from squall.sim.cluster.without_numbers import (
    HostWithoutNumbers,
    MemberWithoutNumbers,
    SimulatedTimes,
    job_without_numbers,
)
from squall.strategies import Strategy
from squall.strategies.work import BatchMethod, Collective
from squall.task import TaskFunction
from squall.usercode.kept import Code, write_plan

GRADIENTS = ("real", "none")
FRUITLESS_AT_MOST = 100  # restarts from one snapshot
LEAST_S = 1e-9  # of a run's time that is over: settings have no 0


@chance_kept()
def simulate(
    task: TaskFunction,
    strategy: Strategy,
    cluster: Cluster,
    *,
    gradients: str = "real",
    epochs: int | None = None,
    steps: int | None = None,
    until: str | None = None,
    keep_best: str | None = None,
    patience: int | None = None,
    seed: int = 0,
    run_dir: str | Path | None = None,
    settings: Settings | None = None,
    watch: Callable[[float], None] = lambda now: None,
) -> Forecast:
    """Run a task with a strategy on a modelled cluster, under a virtual clock.

    The machines of the protocol are those of a real run; what a step, an exchange and a message take comes from the
    cluster, and so do failures.

    Args:
        task: as of `fit`.
        strategy: as of `fit`, except `SingleProcess`.
        cluster: as `Cluster.load` reads it, or as code makes it.
        gradients: "real": they are computed, and a run's directory is written, whose time axis is virtual time.
            Where the system lets a process have too few files open for a schedule of each, there is no replay.
            "none": nothing is computed, so thousands of replicas are simulated in seconds; there are no metrics.
        epochs, steps, until, keep_best, patience, seed: as of `fit`.
        run_dir: where to keep the run of real gradients; a new directory under runs/ by default.
        settings: `seconds` (virtual), `evaluate_every_s`, `snapshot_every_s`, `slow`, and `parts`, which take time as
            the cluster says, or as is measured here; gradients are those of one part. The rest does not count here.
        watch: told the virtual time now and then.

    Returns:
        What came of it; with the status "interrupted" after Ctrl-C during a run of real gradients.

    Raises:
        ValueError: a setting, the task or the cluster is wrong; nothing was simulated.
    """
    real = _with_numbers(gradients, strategy, {"until": until, "keep_best": keep_best, "patience": patience})
    settings = settings or Settings()
    aims = Aims(epochs=epochs, steps=steps, until=until, keep_best=keep_best, patience=patience)
    parts, plan = settings.parts, make_plan(strategy, dataclasses.replace(settings, launcher="local"), aims, seed=seed)
    settings = dataclasses.replace(settings, launcher="inline", progress=False, parts=1)
    built, layout = build_checked(task, plan := msgspec.structs.replace(plan, settings=settings), strategy)
    cluster = dataclasses.replace(cluster, split=split_of(cluster, built, parts, plan.threads))
    if not real:
        return _Simulation(job_without_numbers(plan, strategy, built, layout), cluster, real=False).run(watch)
    plan = msgspec.structs.replace(plan, simulated=True)
    job = private_job(plan, strategy, built, layout, new_directory(run_dir))
    return _kept(job, Code(task=task, strategy=strategy, settings=settings, plan=plan), cluster, watch)


def _kept(job: Job, code: Code, cluster: Cluster, watch: Callable[[float], None]) -> Forecast:
    """Simulate with real gradients, and keep the run in the job's directory."""
    with hold(job.directory):
        write_plan(job.directory, code)
        forecast = _Simulation(job, cluster, real=True).run(watch)
        finish(Run(job.directory, code["task"]))
    return dataclasses.replace(forecast, run_directory=str(job.directory))


def _with_numbers(gradients: str, strategy: Strategy, of_metrics: dict[str, object]) -> bool:
    """Whether gradients are computed. Raises `ValueError` where what is asked for cannot be simulated so."""
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients is {gradients!r}: use one of {', '.join(GRADIENTS)}")
    name, recipe = type(strategy).__name__, strategy.recipe()
    if recipe.alone:
        raise ValueError(f"{name} is one process without exchanges: there is nothing to simulate")
    if gradients == "real":
        return True
    if named := next((setting for setting, value in of_metrics.items() if value is not None), None):
        raise ValueError(f"{named} needs metrics, and gradients='none' has none: use gradients='real'")
    if isinstance(recipe.work, BatchMethod):
        raise ValueError(f"{name} decides by what it computes: use gradients='real'")
    return False


class _Simulation:
    """A job on a cluster, from its start to its forecast."""

    def __init__(self, job: Job, cluster: Cluster, real: bool) -> None:
        self._began = time.perf_counter()
        self._job = job
        self._cluster = cluster
        self._real = real
        self._recipe = job.recipe
        placement, chance = Placement(cluster, job.recipe), random.Random(job.plan.seed)
        self._costs = Costs(cluster, job.recipe, self._workload(), placement, chance, job.plan.settings.slow)
        self._numberless = HostWithoutNumbers(self._costs)
        self._sums = Sums()
        # Links repair what a wire does. Where it does nothing, they would only cost time.
        self._linked = any(link.loss for link in (cluster.between, cluster.within))
        self._channel = LoneChannel()
        self._newest = self._fruitless = 0  # snapshot, and restarts since it was written
        self._coordinator: Coordinator | None = None  # of the newest start
        self._recorder: CoordinatorHost | None = None  # alike, of real gradients

    def run(self, watch: Callable[[float], None]) -> Forecast:
        job = self._job
        with _calm(job, self._channel) if self._real else _no_collections():
            rehearsal = Rehearsal(self._members, nodes(job), self._cluster, self._costs, job.plan.seed, self._hopeful)
            try:
                rehearsal.run(watch)
            except Exception as error:
                if self._recorder is not None:
                    self._recorder.perform(End("failed", f"{type(error).__name__}: {error}"), rehearsal.now)
                raise
        return self._forecast(rehearsal)

    def _workload(self) -> Workload:
        job, shards = self._job, self._recipe.shards
        ranges = [job.layout.shard_range(index, shards) for index in range(shards)] or [(0, job.layout.length)]
        validation = len(cast(Sized, job.task.validate)) if job.task.validate is not None else 0
        return Workload(
            step_s=0.0 if self._cluster.measured else own_step_s(job.plan, job.task, job.layout),
            batch_size=job.task.batch_size,
            elements=tuple(stop - start for start, stop in ranges), validation=validation,
        )  # fmt: skip

    # ------------------------------------------------------------ the run's nodes

    def _members(self, now: float) -> MakeMember:
        """What makes the nodes of a start, from the beginning or from the newest snapshot."""
        published = self._sums.published
        restored = self._restored(published.number) if published is not None else None
        initial = self._job.initial.clone()  # shards train in it, and another start may begin there again
        job = dataclasses.replace(
            self._job, initial=initial, restored=restored, plan=self._rest_of_plan(now, restored)
        )  # fmt: skip
        if self._real and may_open(len(nodes(job))):
            job = attempts.begin(job)
        elif self._real and published is None:
            reason = f"this process may not open {len(nodes(job)):,} files more (ulimit -n)"
            sys.stderr.write(f"squall: warning: {reason}: there will be no replay\n")

        ring: Ring | None = None

        def member(node: Node, world: World) -> tuple[Linked | Machine, Host]:
            nonlocal ring
            linked = machine(job, node)
            if isinstance(linked.machine, Coordinator):
                self._coordinator = linked.machine
            if ring is None and isinstance(job.recipe.work, Collective):
                ring = Ring(world, self._costs, self._cluster.between, job.layout, self._cluster.parts)
            return linked if self._linked else linked.machine, self._host(job, node, ring)

        return member

    def _hopeful(self) -> bool:
        """Whether a run that is always lost before its next snapshot shall begin once more."""
        newest = self._sums.published.number if self._sums.published is not None else 0
        self._fruitless = self._fruitless + 1 if newest == self._newest else 0
        self._newest = newest
        if self._fruitless < FRUITLESS_AT_MOST:
            return True
        self._sums.end = End("failed", f"lost {FRUITLESS_AT_MOST} times in a row before the next snapshot: take more")
        return False

    def _rest_of_plan(self, now: float, restored: Restored | None) -> Plan:
        """Here `seconds` are those that pass; in a run that is resumed, those whose training was kept."""
        plan, began_s = self._job.plan, self._sums.began_s
        if plan.settings.seconds is None or began_s is None:
            return plan
        kept_s = restored.manifest.trained_s if restored is not None else 0.0
        seconds = max(LEAST_S, plan.settings.seconds - (now - began_s) + kept_s)
        return msgspec.structs.replace(plan, settings=dataclasses.replace(plan.settings, seconds=seconds))

    def _restored(self, number: int) -> Restored:
        if self._real:
            return Snapshots(self._job.directory).restore(number, self._job.layout)
        published = self._sums.published
        assert published is not None
        manifest = Manifest(
            number, self._job.layout, published.versions, published.ledger, published.progress, 0.0, 0.0, "",
            examples=published.examples,
        )  # fmt: skip
        return Restored(manifest, {})

    def _host(self, job: Job, node: Node, ring: Ring | None) -> Host:
        if node == COORDINATOR:
            self._recorder = CoordinatorHost(job, self._channel) if self._real else None
            return NotesWatch(self._sums, self._recorder or self._numberless)
        if node == NURSERY:
            return Premises()
        if not self._real:
            return self._numberless if ring is None or node.role != "replica" else MemberWithoutNumbers(node, ring)
        host = own_host(job, node, ring)
        return SimulatedTimes(host, self._costs) if node.role == "replica" and ring is None else host

    # ------------------------------------------------------------ what came of it

    def _forecast(self, rehearsal: Rehearsal) -> Forecast:
        job, recipe, sums, costs = self._job, self._recipe, self._sums, self._costs
        assert self._coordinator is not None
        stopped_s = sums.stopped_s if sums.stopped_s is not None else rehearsal.now
        training_s = stopped_s - (sums.began_s or 0.0)
        trained, spent_s = self._coordinator.trained, sums.compute_s + sums.wait_s
        pushes = sum(sums.staleness.values())
        stale = sum(updates * count for updates, count in sums.staleness.items())
        end = sums.end or End("failed", "the coordinator was lost")
        return Forecast(
            strategy=strategy_name(job.strategy), replicas=recipe.replicas, parts=self._cluster.parts,
            shards=recipe.shards, status=end.status, reason=end.reason, training_s=training_s, examples=trained,
            examples_per_second=trained / training_s if training_s > 0 else 0.0,
            epochs=trained / job.task.examples, updates=max(sums.published.versions) if sums.published else 0,
            idle=sums.wait_s / spent_s if spent_s else 0.0,
            shard_busy=costs.busy_s / (recipe.shards * training_s) if recipe.shards and training_s > 0 else 0.0,
            staleness_mean=stale / pushes if pushes else None, staleness_max=max(sums.staleness, default=None),
            staleness=dict(sorted(sums.staleness.items())), bytes=costs.bytes,
            bytes_per_second=costs.bytes / training_s if training_s > 0 else 0.0,
            goodput=trained / costs.computed if costs.computed else 0.0,
            lost=rehearsal.lost, restarts=rehearsal.restarts,
            metrics=sums.metrics, reached_s=None if sums.reached_s is None else sums.reached_s - (sums.began_s or 0.0),
            messages=costs.messages, wall_s=time.perf_counter() - self._began,
        )  # fmt: skip


@contextmanager
def _calm(job: Job, channel: LoneChannel) -> Iterator[None]:
    """As many threads as a replica has; Ctrl-C asks for a snapshot and an orderly end."""
    with threads(job.plan.threads), collected_interrupts() as channel.interrupts:
        yield


@contextmanager
def _no_collections() -> Iterator[None]:
    """Millions of messages are made and dropped, none in a cycle: looking for cycles would be a tenth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
