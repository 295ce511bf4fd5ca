"""Sandblaster's promises with real processes and real signals."""

from __future__ import annotations

import json
import os
import signal
from functools import cache
from pathlib import Path
from uuid import uuid4

import pytest

import squall
from squall.record.rows import EventRow, MetricRow
from squall.run import Run
from squall.runtime.snapshot import Snapshots
from tests import deep
from tests.launchers import logistic
from tests.launchers.processes import START_S, Started, wait_for
from tests.launchers.test_copies import lose_a_shard, wait_whole
from tests.launchers.test_deputies import Second, lose_first_machine
from tests.launchers.test_machines import cluster
from tests.tasks import INLINE
from tests.warm import squall as command

SETTINGS = ("--strategy", "sandblaster", "--batch", "full", "--replicas", "3", "--shards", "2")
FILE = str(Path(logistic.__file__))


@cache
def undisturbed(directory: Path) -> float:
    """The optimum, found in one process."""
    run = squall.fit(logistic.task, squall.Sandblaster(batch="full", replicas=1), settings=INLINE, run_dir=directory)
    return run.summary().metrics["objective"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone") / "run"


@pytest.fixture
def started(tmp_path: Path) -> Started:
    """In the midst of its iterations: on a loaded machine one may be over before it is looked at."""
    while True:
        directory = tmp_path / f"run-{uuid4().hex[:8]}"
        run = Started(directory, "train", FILE, "--run-dir", str(directory), *SETTINGS, "--json")
        run.wait_rows(MetricRow, lambda row: row.name == "objective" and row.updates >= 5)
        if "replica 1" in run.processes():
            return run
        run.finish()


def reached(run: Started, found: dict[str, object], directory: Path) -> None:
    metrics = found["metrics"]
    assert isinstance(metrics, dict)
    assert metrics["objective"] == pytest.approx(undisturbed(directory), rel=1e-6)
    assert run.gone()


@deep.only
def test_a_killed_replica_is_replaced_and_the_method_goes_on(started: Started, alone: Path) -> None:
    started.kill("replica 1")
    status, out, err = started.finish()
    assert status == 0, err
    reached(started, json.loads(out), alone)
    assert any(event.kind == "replaced" for event in started.rows(EventRow))  # type: ignore[attr-defined]


def replays(directory: Path) -> None:
    replayed = command("replay", directory, "--check")
    assert replayed.returncode == 0, replayed.stderr + replayed.stdout
    assert "the same, bit for bit" in replayed.stdout


def test_killed_shards_are_succeeded_and_the_method_goes_on(started: Started, alone: Path) -> None:
    for role in ("shard 0", "shard 1"):
        started.kill(role)
        wait_for(lambda role=role: started.replaced(role), 20, f"a successor of {role}")
    status, out, err = started.finish()
    assert status == 0, err
    reached(started, json.loads(out), alone)
    replays(started.directory)


@deep.only
@pytest.mark.parametrize("operation", deep.sweep(["add", "mul", "mv"], 1))
def test_a_shard_that_dies_inside_a_change_of_its_vectors_is_succeeded(
    tmp_path: Path, alone: Path, operation: str
) -> None:
    directory, killed = tmp_path / f"run-{uuid4().hex[:8]}", tmp_path / "killed"
    environment = {**os.environ, "KILLED": str(killed), "KILLED_IN": operation}
    flags = ("--run-dir", str(directory), *SETTINGS, "--json")
    run = Started(directory, "train", str(Path(FILE).with_name("torn.py")), *flags, env=environment)
    status, out, err = run.finish()
    assert status == 0, err
    assert killed.exists()
    assert run.replaced("shard 0") == 1
    reached(run, json.loads(out), alone)
    replayed = command("replay", directory, "--check", env=environment)
    assert "the same, bit for bit" in replayed.stdout, replayed.stderr


@deep.only
@pytest.mark.parametrize("changes", [("--replicas", "1", "--shards", "3"), ()])
def test_an_interrupted_run_goes_on_from_its_iteration(started: Started, alone: Path, changes: tuple[str, ...]) -> None:
    started.process.send_signal(signal.SIGINT)
    assert started.finish()[0] == 130
    before = max(row.updates for row in started.rows(MetricRow) if row.name == "objective")  # type: ignore[attr-defined]
    assert before >= 5
    again = Started(started.directory, "resume", str(started.directory), *changes, "--json")
    status, out, err = again.finish()
    assert status == 0, err
    reached(again, json.loads(out), alone)


def test_where_nobody_succeeds_the_run_ends_and_the_snapshot_is_good(tmp_path: Path) -> None:
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    flags = (*SETTINGS, "--tolerance-gradient", "0", "--tolerance-change", "0", "--snapshot-every-s", "0.2")
    run = Started(directory, "train", FILE, "--run-dir", str(directory), *flags, "--restarts", "0")
    wait_for(lambda: (directory / "snapshots" / "000002" / "manifest.json").exists(), START_S, "a second snapshot")
    pid = run.kill("nursery")
    status, _, err = run.finish()
    assert status == 1
    assert f"the nursery (pid {pid}) was lost" in err
    snapshots = Snapshots(directory)
    number = snapshots.newest()
    assert number is not None
    steps = max(snapshots.manifest(number).versions) + 3
    status, out, err = Started(directory, "resume", str(directory), "--steps", str(steps), "--json").finish()
    assert status == 0, err
    assert json.loads(out)["updates"] <= steps
    assert Run(directory).summary().status == "finished"


@deep.only
def test_a_shards_backup_takes_over_its_vectors_when_its_machine_is_lost(tmp_path: Path, alone: Path) -> None:
    flags = [*SETTINGS, "--threads", "1", "--copies", "2", "--json"]
    with cluster(tmp_path, 3, *flags, file=Path(FILE)) as found:
        wait_whole(found.run)
        lose_a_shard(found)
        status, out, err = found.run.finish(5 * START_S)
        assert status == 0, err
        reached(found.run, json.loads(out), alone)


@deep.only
def test_it_outlives_its_first_machine(tmp_path: Path, alone: Path) -> None:
    with cluster(tmp_path, 3, *SETTINGS, "--threads", "1", "--copies", "2", file=Path(FILE)) as found:
        wait_whole(found.run)
        second = Second(found, found.machines)
        lose_first_machine(found)
        for machine in found.machines:
            status, said = machine.finish(5 * START_S)
            assert status == 0, said
        assert second.told("by its deputy")
        *_, last = [row for row in second.rows(MetricRow) if row.name == "objective"]
        assert last.value == pytest.approx(undisturbed(alone), rel=1e-6)
