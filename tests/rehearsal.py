"""Runs in virtual time that keep a schedule: replicas of changing speed, a jittering network, deaths."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import nn

import squall
from squall.launchers.inline import InlineRun
from squall.plan import check_together, make_plan
from squall.run import Run
from squall.runtime import attempts
from squall.runtime.job import private_job
from squall.runtime.run_plan import Aims
from squall.runtime.seeds import seed_everything
from squall.runtime.snapshot import Snapshots
from squall.runtime.wire import Network
from squall.task import TaskFunction
from squall.usercode.kept import Code, write_plan
from tests.tasks import Noisy, regression


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.2), nn.Linear(9, 1))


NOISY: TaskFunction = regression(normalized, train=Noisy(90))  # dropout, BatchNorm and augmentation


def rehearse(
    directory: Path, strategy: squall.Strategy, task: TaskFunction = NOISY, *, epochs: int = 3, seed: int = 0,
    kill_at: dict[int, int] | None = None, again: bool = False, snapshots_every_s: float | None = None,
    keep_schedule: float | str | None = None, jitter_s: float = 0.004,
) -> Run:  # fmt: skip
    """Train in virtual time; `kill_at` tells which slot's process dies after so many events."""
    settings = squall.Settings(
        launcher="inline", threads=1, progress=False, snapshot_every_s=snapshots_every_s, keep_schedule=keep_schedule
    )
    plan = make_plan(strategy, settings, Aims(epochs=epochs), seed=seed)
    directory.mkdir(exist_ok=True)
    write_plan(directory, Code(task=task, strategy=strategy, settings=settings, plan=plan))
    torch.set_num_threads(1)
    seed_everything(seed)
    built = task()
    layout = check_together(plan, strategy, built)
    newest = Snapshots(directory).newest() if again else None
    restored = Snapshots(directory).restore(newest, layout) if newest is not None else None
    job = attempts.begin(private_job(plan, strategy, built, layout, directory, restored))
    chance = random.Random(seed)
    run = InlineRun(job, lambda node: chance.choice([0.002, 0.01, 0.03]))
    world = run.world
    world._arrivals = Network(latency_s=0.001, jitter_s=jitter_s).arrivals
    for events, slot in sorted((kill_at or {}).items()):
        world.run(at_most=events)
        victim = max(node for node in world.processes if node.role == "replica" and node.index == slot)
        world.kill(victim)
    end = run.run()
    assert end.status == "finished", end
    return Run(directory, task)


def same(first: nn.Module, second: nn.Module) -> bool:
    """All parameters and buffers are the same bits."""
    mine, theirs = first.state_dict(), second.state_dict()
    return list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)


def assert_replays(run: Run) -> squall.Replayed:
    """The replay finds every update and the snapshots the same, and its model is that of the run, bit for bit."""
    replayed = squall.replay(run.directory, check=True)
    assert replayed.difference is None, str(replayed)
    assert not replayed.stopped
    assert not replayed.elsewhere
    assert replayed.fingerprints > 0
    assert replayed.snapshots
    assert same(replayed.model, run.model)
    snapshots = Snapshots(run.directory)
    assert snapshots.manifest(snapshots.numbers()[-1]).versions == replayed.versions
    return replayed
