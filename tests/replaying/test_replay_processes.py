"""A replay of real processes arrives at their weights, bit for bit: also when one was killed half-way."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import squall
from squall.record.rows import MemberRow, ProgressRow
from squall.run import Run
from squall.runtime.replay_starts import complete
from tests import deep
from tests.launchers.processes import FILE, START_S, Started, wait_for
from tests.rehearsal import assert_replays
from tests.tasks import Noisy, regression

TASK = Path(__file__).with_name("augmented.py")
SGD = partial(torch.optim.SGD, lr=0.05)
STRATEGIES = {
    "downpour": squall.Downpour(replicas=3, shards=2, overlap=True, push_every=2, optimizer=SGD),
    "elastic averaging": squall.ElasticAveraging(replicas=2, shards=2, every=3, optimizer=SGD),
    "l-bfgs": squall.Sandblaster(batch="full", replicas=2, shards=2, push_every=2),
    "decoupled diloco": squall.DiLoCo(replicas=3, optimizer=SGD, inner_steps=3, form="decoupled"),
}


def wide() -> nn.Module:
    """Large enough for torch to divide its sums among threads."""
    return nn.Sequential(nn.Linear(6, 3000), nn.Tanh(), nn.Linear(3000, 1))


def wide_and_noisy() -> nn.Module:
    return nn.Sequential(*wide(), nn.Dropout(0.2), nn.BatchNorm1d(1))


def training(directory: Path, task: Path, *flags: str) -> Started:
    """In full training, with every replica at work."""
    run = Started(directory, "train", str(task), "--run-dir", str(directory), "--shards", "2", *flags)
    run.wait_rows(ProgressRow, lambda row: row.replica == 0)
    run.wait_rows(ProgressRow, lambda row: row.replica == 1)
    return run


@deep.only
def test_a_replica_killed_half_way_dropout_augmentation_and_loader_processes(tmp_path: Path) -> None:
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = training(directory, TASK, "--epochs", "6", "--snapshot-every-s", "1")
    run.kill("replica 1")
    run.wait_rows(MemberRow, lambda row: row.node == "replica-1.1" and row.change == "joined")
    status, _, error = run.finish()
    assert status == 0, error
    assert (directory / "schedule" / "0" / "replica-1.1").exists()
    weights = tmp_path / "weights"
    flags = ("--check", "--output", str(weights))
    status, output, error = Started(directory, "replay", str(directory), *flags).finish()
    assert status == 0, error + output
    assert "the same, bit for bit" in output
    found, wanted = load_file(weights), Run(directory).model.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", deep.sweep(list(STRATEGIES), 2))
def test_the_weights_of_asynchronous_processes_are_computed_again(
    name: str, run_dir: Path, without_report: None
) -> None:
    """Sums depend on the number of threads: a replica's, and the one that a shard has."""
    threads, steps = (2, 40) if name == "downpour" else (1, 10)
    settings = squall.Settings(threads=threads, progress=False)
    task = regression(wide) if name == "l-bfgs" else regression(wide_and_noisy, train=Noisy(90))
    assert_replays(squall.fit(task, STRATEGIES[name], steps=steps, run_dir=run_dir, settings=settings))


@deep.only
def test_the_end_of_a_run_is_replayed_from_a_snapshot_across_a_kill_an_interrupt_and_a_resume(tmp_path: Path) -> None:
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = training(directory, TASK, "--epochs", "1000", "--snapshot-every-s", "0.4", "--keep-schedule", "last:2")
    attempts = directory / "schedule"
    wait_for(lambda: len(complete(attempts / "0", 2)) > 2, START_S, "three snapshots")
    run.kill("replica 1")
    run.wait_rows(MemberRow, lambda row: row.node == "replica-1.1" and row.change == "joined")
    kept = complete(attempts / "0", 2)
    wait_for(lambda: complete(attempts / "0", 2)[0] > kept[-1], START_S, "snapshots behind the kill alone")
    run.kill("replica 0")
    run.process.send_signal(signal.SIGINT)
    run.finish()
    again = Started(directory, "resume", str(directory), "--as-it-was")
    wait_for(lambda: len(complete(attempts / "1", 2)) > 0, START_S, "a snapshot of the second attempt")
    first = complete(attempts / "1", 2)[0]
    again.process.send_signal(signal.SIGINT)
    again.finish()
    # A slow machine comes to more snapshots before it hears of Ctrl-C: then the last two are of the second attempt.
    of_both = complete(attempts / "1", 2)[-1] == first + 1
    assert [path.name for path in sorted(attempts.iterdir())] == (["0", "1"] if of_both else ["1"])
    assert not (attempts / "0" / "shard-0.0").exists()
    replayed = assert_replays(Run(directory))
    assert replayed.snapshot == complete(attempts / ("0" if of_both else "1"), 2)[0]


@pytest.mark.parametrize("flags", [(), ("--keep-schedule", "last:1", "--snapshot-every-s", "0.3")], ids=["", "last"])
def test_a_run_that_was_killed_whole_is_replayed_to_where_it_was(flags: tuple[str, ...], tmp_path: Path) -> None:
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = training(directory, FILE, "--epochs", "1000", "--restarts", "0", *flags)
    first = directory / "schedule" / "0" / "shard-0.0"
    wait_for(lambda: not flags or not first.exists(), START_S, "what is kept to begin at a snapshot")
    os.killpg(run.processes()["nursery"], signal.SIGKILL)
    run.finish()
    replayed = squall.replay(directory, check=True)
    assert replayed.updates > replayed.since
    assert replayed.difference is None
    assert (replayed.snapshot is not None) == bool(flags)
