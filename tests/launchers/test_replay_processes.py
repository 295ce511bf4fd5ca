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

import squall
from squall.record import Member, Progress
from squall.run import Run
from tests.launchers.processes import FILE, Started
from tests.rehearsal import NOISY, assert_replays, same
from tests.tasks import LOCAL

TASK = Path(__file__).with_name("augmented.py")
SGD = partial(torch.optim.SGD, lr=0.05)
STRATEGIES = {
    "downpour": squall.Downpour(replicas=3, shards=2, overlap=True, push_every=2, optimizer=SGD),
    "elastic averaging": squall.ElasticAveraging(replicas=2, shards=2, every=3, optimizer=SGD),
    "decoupled diloco": squall.DiLoCo(replicas=3, optimizer=SGD, inner_steps=3, form="decoupled"),
}


def training(directory: Path, task: Path, *flags: str) -> Started:
    """In full training, with every replica at work."""
    run = Started(directory, "train", str(task), "--run-dir", str(directory), "--shards", "2", *flags)
    run.wait_rows(Progress, lambda row: row.replica == 0)
    run.wait_rows(Progress, lambda row: row.replica == 1)
    return run


def test_a_replica_killed_half_way_dropout_augmentation_and_loader_processes(tmp_path: Path) -> None:
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = training(directory, TASK, "--epochs", "8", "--snapshot-every-s", "1")
    run.kill("replica 1")
    run.wait_rows(Member, lambda row: row.node == "replica-1.1" and row.change == "joined")
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


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_weights_of_asynchronous_processes_are_computed_again(
    name: str, run_dir: Path, without_report: None
) -> None:
    assert_replays(squall.fit(NOISY, STRATEGIES[name], epochs=8, run_dir=run_dir, settings=LOCAL))


def test_a_run_that_was_killed_whole_is_replayed_to_where_it_was_and_resumed(tmp_path: Path) -> None:
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = training(directory, FILE, "--epochs", "1000")
    os.killpg(run.processes()["nursery"], signal.SIGKILL)
    run.finish()
    replayed = squall.replay(directory, check=True)
    assert replayed.updates > 0
    assert replayed.difference is None
    status, _, error = Started(directory, "resume", str(directory), "--epochs", "2", "--shards", "1").finish()
    assert status == 0, error
    assert same(squall.replay(directory, check=True).model, Run(directory).model)


def test_a_scripts_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    script = Path(__file__).with_name("script.py")
    status, _, error = Started(directory, "run", "--run-dir", str(directory), "--replicas", "2", str(script)).finish()
    assert status == 0, error
    assert not (directory / "schedule").exists()
    with pytest.raises(ValueError, match="is the run of a script, whose loop is its own"):
        squall.replay(directory)
