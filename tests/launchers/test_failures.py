"""What a user is promised when processes die: real processes, real signals."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from squall.record.rows import EventRow, MemberRow, ProgressRow
from squall.report import Reader, audit
from squall.runtime.lock import holders
from squall.runtime.snapshot import Snapshots
from tests import deep
from tests.launchers.processes import START_S, Started, send, wait_for

ENDLESS = ("--epochs", "100000", "--shards", "2", "--restarts", "0")


@pytest.fixture
def shared_memory_before() -> set[str]:
    before = {name for name in os.listdir("/dev/shm") if name.startswith("squall")}
    return before


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Started]:
    """Two replicas, two shards, an evaluator, a coordinator, in full training."""
    run = Started.train(tmp_path / f"run-{uuid4().hex[:8]}", *ENDLESS, "--snapshot-every-s", "0.5", draws=True)
    try:
        run.wait_rows(ProgressRow, lambda row: row.replica == 0)
        run.wait_rows(ProgressRow, lambda row: row.replica == 1)
        yield run
    finally:
        run.process.kill()
        run.finish()
        send(run.processes().values(), signal.SIGKILL)  # what a test has stopped ends by nothing else
        wait_for(run.gone, 10, "the processes to end")


def end_of(run: Started, number: int, within_s: float) -> tuple[int, str, str]:
    """Send a signal to the launching process and see everything gone in time."""
    began = time.monotonic()
    run.process.send_signal(number)
    result = run.finish()
    assert time.monotonic() - began < within_s
    assert run.gone()
    return result


def test_every_process_has_its_name_and_the_lock_and_a_killed_evaluator_is_replaced(
    endless: Started,
) -> None:
    roles = {"nursery", "coordinator", "shard 0", "shard 1", "replica 0", "replica 1", "evaluator"}
    wait_for(lambda: set(endless.processes()) == roles, 10, "the names of all roles")
    assert set(holders(endless.directory / "lock")) == {endless.process.pid, *endless.processes().values()}
    old = endless.kill("evaluator")
    wait_for(lambda: endless.processes().get("evaluator", old) != old, 5.0, "another evaluator")


@pytest.mark.parametrize("victim", deep.sweep(["replica 1", "replica 0"], 1))
def test_a_killed_replica_is_replaced_and_loses_no_example(endless: Started, victim: str) -> None:
    index = int(victim.split()[1])
    old = endless.kill(victim)
    seen = len(endless.rows(ProgressRow))
    others = lambda: [r for r in endless.rows(ProgressRow)[seen:] if r.replica != index]  # noqa: E731
    wait_for(others, 2.0, "the other replica to go on")
    new = lambda: endless.processes().get(victim, old) != old  # noqa: E731
    wait_for(new, 2.0, "a replacement")
    endless.wait_rows(MemberRow, lambda r: r.node == f"replica-{index}.1" and r.change == "joined", 10)
    joined = len(endless.rows(ProgressRow))
    wait_for(lambda: any(r.replica == index for r in endless.rows(ProgressRow)[joined:]), 10, "it to train")
    end_of(endless, signal.SIGINT, 6.0)
    reader = Reader(endless.directory / "run.sqlite")
    found = audit(reader)
    reader.close()
    newest = max(epoch.epoch for epoch in found.epochs)
    early = [epoch for epoch in found.epochs if epoch.epoch < newest - 1]
    holes = [epoch for epoch in early if not all(span.times for span in epoch.spans)]
    assert not holes, str(found)
    assert any(e.kind == "lost" and "SIGKILL" in e.text for e in endless.rows(EventRow))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_snapshot_and_nothing_else(endless: Started, number: int) -> None:
    """Batch systems and Ray's job server send SIGTERM to all processes."""
    send([endless.process.pid, *(endless.processes().values() if number == signal.SIGTERM else ())], number)
    wait_for(endless.gone, 3.0, "the children to be gone")
    status, out, err = endless.finish(3.0)
    assert status == 130
    assert f"squall resume {endless.directory}" in out + err
    assert "Traceback" not in err
    assert Snapshots(endless.directory).numbers()
    assert (endless.directory / "report.html").exists()


def test_a_second_interrupt_insists(endless: Started) -> None:
    endless.process.send_signal(signal.SIGINT)
    endless.process.send_signal(signal.SIGINT)
    status, _, err = endless.finish(10)
    assert status == 130
    assert f"squall resume {endless.directory}" in err
    assert "Traceback" not in err
    wait_for(endless.gone, 5, "the children to be gone")


@pytest.mark.parametrize(
    ("stopped", "said"),
    [
        (("shard 1", "replica 0", "evaluator"), "shard 1 did not answer in time, so that nothing was saved"),
        (("coordinator",), "interrupted"),  # which is succeeded
    ],
)
def test_an_interrupt_ends_a_run_of_which_some_stand_still(
    endless: Started, stopped: tuple[str, ...], said: str
) -> None:
    wait_for(lambda: Snapshots(endless.directory).numbers(), 30, "a snapshot")
    for role in stopped:
        endless.kill(role, signal.SIGSTOP)
    endless.process.send_signal(signal.SIGINT)
    assert wait_for(endless.gone, 4.0, "the children to be gone") < 3.0
    status, _, err = endless.finish()
    assert status == 130
    assert said in err
    assert re.search(r"from snapshot \d+ with: squall resume " + re.escape(str(endless.directory)), err)


@pytest.mark.parametrize("stopped", [(), ("nursery", "coordinator", "shard 0", "replica 1")])
def test_nothing_is_left_when_the_launching_process_is_killed(
    endless: Started, stopped: tuple[str, ...], shared_memory_before: set[str]
) -> None:
    for role in stopped:
        endless.kill(role, signal.SIGSTOP)
    endless.process.kill()
    wait_for(endless.gone, 5, "the children to be gone")
    assert {name for name in os.listdir("/dev/shm") if name.startswith("squall")} == shared_memory_before


def test_nothing_is_left_when_the_nursery_is_killed(endless: Started) -> None:
    endless.kill("nursery")
    status, _, err = endless.finish(10)
    assert status == 1
    assert "nursery" in err
    assert "Traceback" not in err
    wait_for(endless.gone, 5, "the children to be gone")


def test_a_run_whose_directory_is_removed_ends_and_says_so(endless: Started) -> None:
    began = time.monotonic()
    shutil.rmtree(endless.directory, ignore_errors=True)  # schedules and snapshots may appear meanwhile
    wait_for(lambda: shutil.rmtree(endless.directory, ignore_errors=True) or not endless.directory.exists(), 5, "it")
    status, _, err = endless.finish(10)
    assert time.monotonic() - began < 6.0
    assert status == 1
    assert f"{endless.directory} was removed while the run went on" in err
    assert "Traceback" not in err
    assert endless.gone()


def test_interrupted_before_training_begins(tmp_path: Path) -> None:
    run = Started.train(tmp_path / f"run-{uuid4().hex[:8]}", *ENDLESS)
    wait_for(lambda: run.processes() or run.process.poll() is not None, START_S, "the first process")
    status, _, err = end_of(run, signal.SIGINT, 10.0)
    assert status == 130
    assert "Traceback" not in err
    assert not run.directory.exists() or "squall resume" in err, "there is a run to go on with, or nothing at all"


@pytest.mark.parametrize("how", [("--strategy", "single_process"), ("--launcher", "inline")])
def test_a_run_in_one_process_is_interrupted_as_orderly(tmp_path: Path, how: tuple[str, str]) -> None:
    run = Started.train(tmp_path / f"run-{uuid4().hex[:8]}", "--epochs", "100000", *how)
    run.wait_rows(ProgressRow, lambda row: row.examples > 0)
    status, _, err = end_of(run, signal.SIGTERM, 10.0)
    assert status == 130
    assert f"squall resume {run.directory}" in err
    assert Snapshots(run.directory).numbers()


@deep.only
def test_a_reader_of_progress_that_leaves_does_not_end_the_training(tmp_path: Path) -> None:
    run = Started.train(tmp_path / f"run-{uuid4().hex[:8]}", "--epochs", "40")
    assert run.process.stderr is not None
    run.process.stderr.close()
    assert run.process.wait(START_S) == 0
    run.process.communicate()
    assert any(event.kind == "finished" for event in run.rows(EventRow))
