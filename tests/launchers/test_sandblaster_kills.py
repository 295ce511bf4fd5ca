"""Sandblaster's promises with real processes and real signals."""

from __future__ import annotations

import json
import signal
from functools import cache
from pathlib import Path
from uuid import uuid4

import pytest

import squall
from squall.record.rows import EventRow, MetricRow
from squall.run import Run
from tests import deep
from tests.launchers import logistic
from tests.launchers.processes import START_S, Started, wait_for
from tests.tasks import INLINE

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
    """In the midst of its iterations."""
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = Started(directory, "train", FILE, "--run-dir", str(directory), *SETTINGS, "--json")
    run.wait_rows(MetricRow, lambda row: row.name == "objective" and row.updates >= 5)
    return run


def reached(run: Started, found: dict[str, object], directory: Path) -> None:
    metrics = found["metrics"]
    assert isinstance(metrics, dict)
    assert metrics["objective"] == pytest.approx(undisturbed(directory), rel=1e-6)
    assert run.gone()


def test_a_killed_replica_is_replaced_and_the_method_goes_on(started: Started, alone: Path) -> None:
    started.kill("replica 1")
    status, out, err = started.finish()
    assert status == 0, err
    reached(started, json.loads(out), alone)
    assert any(event.kind == "replaced" for event in started.rows(EventRow))  # type: ignore[attr-defined]


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


def test_a_killed_shard_ends_the_run_and_the_snapshot_is_good(tmp_path: Path) -> None:
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    flags = (*SETTINGS, "--tolerance-gradient", "0", "--tolerance-change", "0", "--snapshot-every-s", "0.2")
    run = Started(directory, "train", FILE, "--run-dir", str(directory), *flags, "--restarts", "0")
    wait_for(lambda: (directory / "snapshots" / "000002" / "manifest.json").exists(), START_S, "a second snapshot")
    pid = run.kill("shard 0")
    status, _, err = run.finish()
    assert status == 1
    assert f"shard 0 (pid {pid}) was lost" in err
    steps = max(row.updates for row in run.rows(MetricRow)) + 3  # type: ignore[attr-defined]
    status, out, err = Started(directory, "resume", str(directory), "--steps", str(steps), "--json").finish()
    assert status == 0, err
    assert json.loads(out)["updates"] <= steps
    assert Run(directory).summary().status == "finished"
