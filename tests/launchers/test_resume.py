"""`squall resume` after an interruption, with the same and with other numbers of processes."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from squall.record.rows import ProgressRow
from squall.report import Reader, audit
from squall.run import Run
from squall.runtime.snapshot import Snapshots
from tests import deep
from tests.launchers.blobs import EXAMPLES
from tests.launchers.processes import START_S, Started, wait_for

CRASHING = ("--epochs", "100000", "--shards", "2", "--snapshot-every-s", "0.5", "--restarts", "0")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interrupted run."""
    directory = tmp_path_factory.mktemp("first") / f"run-{uuid4().hex[:8]}"
    run = Started.train(directory, "--epochs", "400", "--shards", "2", "--optimizer", "adam", "--lr", "0.001")
    run.wait_rows(ProgressRow, lambda row: row.examples > 0)
    run.process.send_signal(signal.SIGINT)
    run.finish()
    return directory


@pytest.fixture
def interrupted(first: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(first, tmp_path / f"run-{uuid4().hex[:8]}"))


def test_the_record_of_an_interrupted_run_tells_what_its_snapshot_holds(interrupted: Path) -> None:
    snapshots = Snapshots(interrupted)
    manifest = snapshots.manifest(snapshots.numbers()[-1])
    held: Any = manifest.ledger["held"]
    beyond = sum(max(0, manifest.progress.get(lease, done) - done) for lease, (_, _, done, _, _) in held.items())
    assert Run(interrupted).summary().examples == int(str(manifest.ledger["trained"])) + beyond


@pytest.mark.parametrize("changes", [(), ("--shards", "3", "--replicas", "1")])
def test_a_resumed_run_trains_every_example(interrupted: Path, changes: tuple[str, ...]) -> None:
    reader = Reader(interrupted / "run.sqlite")
    before = sum(row.examples for row in reader.rows(ProgressRow))
    reader.close()
    epochs = before // EXAMPLES + 2
    flags = ("--epochs", str(epochs), *changes, "--json")
    again = Started(interrupted, "resume", str(interrupted), *flags)
    status, out, err = again.finish()
    assert status == 0, err
    summary = json.loads(out)
    assert summary["status"] == "finished"
    assert summary["examples"] == epochs * EXAMPLES
    reader = Reader(interrupted / "run.sqlite")
    found = audit(reader)
    reader.close()
    assert found.complete, str(found)
    assert len(found.epochs) == epochs


WIDER = """
import dataclasses
from torch import nn
from tests.launchers import blobs

def task():
    model = nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 8))
    return dataclasses.replace(blobs.task(), model=model)
"""


def test_another_model_is_refused_with_the_tensors_that_differ(interrupted: Path, tmp_path: Path) -> None:
    (tmp_path / "wider.py").write_text(WIDER)
    command = ("resume", str(interrupted), "--task", str(tmp_path / "wider.py"))
    status, _, err = Started(interrupted, *command).finish()
    assert status == 1
    assert "0.weight: [48, 16] here, [32, 16] there" in err
    assert "Traceback" not in err


def test_a_run_that_crashed_goes_back_to_its_snapshot_and_so_does_its_record(tmp_path: Path) -> None:
    """What was trained after the snapshot is lost with the weights, so it is trained again and counted once."""
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = Started.train(directory, *CRASHING)
    wait_for(lambda: len(Snapshots(directory).numbers()) == 2, START_S, "a second snapshot")
    seen = len(run.rows(ProgressRow))
    wait_for(lambda: len(run.rows(ProgressRow)) > seen + 2, 10, "progress that will be lost")
    run.kill("nursery")  # and all that it has forked
    assert run.finish()[0] == 1
    snapshots = Snapshots(directory)
    reached = epoch_of(snapshots, snapshots.numbers()[-1])
    status, out, err = Started(directory, "resume", str(directory), "--epochs", str(reached + 2), "--json").finish()
    assert status == 0, err
    assert json.loads(out)["examples"] == (reached + 2) * EXAMPLES
    reader = Reader(directory / "run.sqlite")
    found = audit(reader)
    reader.close()
    assert all(epoch.exact for epoch in found.epochs), str(found)
    assert len(found.epochs) == reached + 2


def epoch_of(snapshots: Snapshots, number: int) -> int:
    return int(str(snapshots.manifest(number).ledger["epoch"]))


@deep.only
def test_a_run_that_is_killed_while_its_record_is_locked_finds_all_rows_of_its_snapshot(tmp_path: Path) -> None:
    """Between rows and snapshot there is no moment at which a kill loses what the ledger calls trained."""
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = Started.train(directory, *CRASHING)
    snapshots = Snapshots(directory)
    run.wait_rows(ProgressRow, lambda row: row.examples > 0)
    with closing(sqlite3.connect(directory / "run.sqlite", timeout=START_S, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        locked = max(snapshots.numbers(), default=0)

        def epochs_went_by() -> bool:
            newest = max(snapshots.numbers(), default=0)
            return newest >= locked + 3 and epoch_of(snapshots, newest) > 1

        wait_for(epochs_went_by, START_S, "snapshots behind the lock, of a later epoch")
        run.kill("nursery")  # and all that it has forked
        assert run.finish()[0] == 1
    assert isinstance(snapshots.manifest(snapshots.numbers()[-1]).rows, bytes)
    reached = epoch_of(snapshots, snapshots.numbers()[-1])
    status, out, err = Started(directory, "resume", str(directory), "--epochs", str(reached + 2), "--json").finish()
    assert status == 0, err
    assert json.loads(out)["examples"] == (reached + 2) * EXAMPLES
    with closing(Reader(directory / "run.sqlite")) as reader:
        found = audit(reader)
    assert all(epoch.exact for epoch in found.epochs), str(found)
    assert len(found.epochs) == reached + 2


def test_a_run_is_not_resumed_while_it_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = Started.train(directory, "--epochs", "100000")
    run.wait_rows(ProgressRow, lambda row: row.examples > 0)
    status, _, err = Started(directory, "resume", str(directory)).finish()
    assert status == 1
    assert "is being trained by another process" in err
    assert set(run.processes()) >= {"coordinator", "shard 0", "replica 0", "replica 1"}
    run.process.send_signal(signal.SIGINT)
    assert run.finish()[0] == 130
