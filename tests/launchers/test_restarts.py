"""A run on one machine starts again by itself when what it cannot go on without has died. Real processes."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch.nn.functional import cross_entropy

import squall
from squall.errors import ProcessLost
from squall.launchers.again import Again
from squall.launchers.local import LocalRun
from squall.record.rows import EventRow, ProgressRow
from squall.record.writer import Record
from squall.report import Reader, audit
from squall.restarting import Starts
from squall.run import Run
from squall.runtime.snapshot import Snapshots
from tests import deep
from tests.launchers import blobs
from tests.launchers.processes import START_S, Started, alive, send, wait_for
from tests.launchers.test_machines import children
from tests.launchers.test_scripts import started
from tests.warm import squall as command


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Started]:
    run = Started.train(tmp_path / f"run-{uuid4().hex[:8]}", "--epochs", "100000", "--snapshot-every-s", "0.5")
    yield from training(run)


@pytest.fixture
def unsaved(tmp_path: Path) -> Iterator[Started]:
    """It has no snapshot before its end."""
    run = Started.train(tmp_path / f"run-{uuid4().hex[:8]}", "--epochs", "100000", "--snapshot-every-s", "1000")
    yield from training(run)


def training(run: Started) -> Iterator[Started]:
    try:
        run.wait_rows(ProgressRow, lambda row: True)
        yield run
    finally:
        run.process.kill()
        run.finish()
        wait_for(run.gone, 10, "the processes to end")


def restarts(run: Started) -> list[str]:
    return [row.text for row in run.rows(EventRow) if row.kind == "restarted"]  # type: ignore[attr-defined]


def starts_again(run: Started, times: int) -> None:
    wait_for(lambda: len(restarts(run)) == times, START_S, "a restart")
    wait_for(lambda: "coordinator" in run.processes(), START_S, "its processes")
    run.goes_on()


def new_snapshot(run: Started) -> None:
    snapshots = Snapshots(run.directory)
    before = snapshots.numbers()[-1:]
    wait_for(lambda: snapshots.numbers()[-1:] > before, START_S, "a new snapshot")


def test_a_killed_nursery_and_then_all_processes_at_once(endless: Started) -> None:
    new_snapshot(endless)
    first_step_s = lambda: Run(endless.directory).summary().first_step_s  # noqa: E731
    before, killed_at = first_step_s(), time.time()
    nursery = endless.kill("nursery")
    starts_again(endless, 1)
    wait_for(lambda: first_step_s() != before, START_S, "its first step")
    assert (first_step_s() or math.inf) < time.time() - killed_at, "counted from the restart"
    new_snapshot(endless)
    send(endless.processes().values(), signal.SIGKILL)
    starts_again(endless, 2)
    endless.process.send_signal(signal.SIGINT)
    status, _, err = endless.finish()
    assert status == 130
    assert endless.gone()
    said = rf"squall: the nursery \(pid {nursery}\) was lost: killed by SIGKILL; starting again from snapshot \d+"
    assert re.search(said + r".* \(restart 1 of 3\)\n", err)
    assert err.count("(restart 1 of 3)") == 2, "the first had left a snapshot"
    with closing(Reader(endless.directory / "run.sqlite")) as reader:
        assert not any(part.missed for part in audit(reader).parts)
    replayed = command("replay", endless.directory, "--check")
    assert replayed.returncode == 0, replayed.stderr


def test_what_is_repeated_is_said_and_without_a_snapshot_it_is_all(unsaved: Started) -> None:
    unsaved.goes_on()
    wait_for(lambda: max(row.time_s for row in unsaved.rows(ProgressRow)) > 0.1, START_S, "some training")  # type: ignore[attr-defined]
    unsaved.kill("nursery")
    starts_again(unsaved, 1)
    unsaved.process.send_signal(signal.SIGINT)
    status, _, err = unsaved.finish()
    assert status == 130
    lost = r"the nursery \(pid \d+\) was lost: killed by SIGKILL; starting again from the beginning"
    repeated = r"the last \d+\.\d s of training \([\d,]+ examples\) are repeated"
    assert re.search(rf"{lost} \(no snapshot was written yet\): {repeated} \(restart 1 of 3\)\n", err), err


def test_who_dies_again_and_again_without_a_snapshot_ends_the_run(tmp_path: Path) -> None:
    name = tmp_path / f"run-{uuid4().hex[:8]}"
    run = Started.train(name, "--epochs", "100000", "--snapshot-every-s", "1000", "--restarts", "1")

    def killed() -> bool:  # again, if a busy machine has made a snapshot in between
        send([pid for role, pid in run.processes().items() if role == "nursery"], signal.SIGKILL)
        return run.process.poll() is not None

    for _ in training(run):
        wait_for(killed, START_S, "the end")
        status, _, err = run.finish()
        assert status == 1
        assert re.search(r"started again once, without a new snapshot\ngo on from (the beginning|snapshot)", err), err


def test_a_nursery_that_is_killed_as_it_starts_is_started_again(tmp_path: Path) -> None:
    run = Started.train(tmp_path / f"run-{uuid4().hex[:8]}", "--epochs", "1")
    leads = lambda: [pid for pid in children(run.process.pid) if os.getsid(pid) == pid]  # noqa: E731
    wait_for(leads, START_S, "the nursery")
    send(leads(), signal.SIGKILL)
    status, _, err = run.finish()
    assert status == 0, err
    assert "killed by SIGKILL; starting again from the beginning (no snapshot was written yet) (restart 1 of 3)" in err
    assert not restarts(run), "it had no record yet"


def test_a_run_that_has_begun_before_soon_has_a_snapshot_to_go_on_from(tmp_path: Path) -> None:
    """However seldom it makes them: it may be lost as often as it gets that far."""
    name = tmp_path / f"run-{uuid4().hex[:8]}"
    run = Started.train(name, "--epochs", "100000", "--snapshot-every-s", "1000", "--restarts", "1")
    for _ in training(run):
        for times in (1, 2, 3):
            run.kill("nursery")
            starts_again(run, times)
            new_snapshot(run)


def test_a_run_that_is_to_end_does_not_start_again(endless: Started) -> None:
    nursery = endless.processes()["nursery"]
    os.kill(nursery, signal.SIGSTOP)  # it cannot see to the end
    endless.process.send_signal(signal.SIGINT)
    os.kill(nursery, signal.SIGKILL)
    status, _, _ = endless.finish()
    assert status in (1, 130)
    assert endless.gone()
    assert not restarts(endless)


def test_an_interrupt_is_heard_while_it_starts_again(endless: Started) -> None:
    new_snapshot(endless)
    endless.kill("nursery")
    wait_for(lambda: restarts(endless), START_S, "a restart")
    endless.process.send_signal(signal.SIGINT)
    status, _, err = endless.finish()
    assert status == 130
    assert re.search(r"interrupted.* go on from snapshot \d+ with: squall resume", err)
    assert endless.gone()


@pytest.mark.parametrize("strategy", deep.sweep(["downpour", "all_reduce"], 1))
@deep.only
def test_a_script_starts_again_from_its_beginning_and_comes_to_its_end(tmp_path: Path, strategy: str) -> None:
    run = started(tmp_path, "--epochs", "40", flags=("--snapshot-every-s", "0.2", "--strategy", strategy))
    run.wait_rows(ProgressRow, lambda row: True)
    run.kill("nursery")
    status, out, err = run.finish()
    assert status == 0, err
    assert len(restarts(run)) == 1
    assert out.count("before\n") == 2, "what is in front of squall.join runs again"
    with closing(Reader(run.directory / "run.sqlite")) as reader:
        assert not any(part.missed for part in audit(reader).parts)


def deadly(batch: Any, model: torch.nn.Module) -> torch.Tensor:
    """Kills the nursery over the tenth batch of the first process that has one, if there is a file named DEADLY."""
    deadly.batches += 1  # type: ignore[attr-defined]
    sign = Path(os.environ["DEADLY"])
    if deadly.batches == 10 and sign.exists():  # type: ignore[attr-defined]
        sign.unlink()
        os.kill(os.getppid(), signal.SIGKILL)
    return cross_entropy(model(batch[0]), batch[1])


deadly.batches = 0  # type: ignore[attr-defined]


def task() -> squall.Task:
    made = blobs.task()
    return squall.Task(
        model=made.model, loss=lambda model, batch: deadly(batch, model), train=made.train, batch_size=16
    )


@pytest.mark.parametrize("how", deep.sweep(["fit", "resume"], 1))
@deep.only
def test_the_functions_say_how_often(run_dir: Path, monkeypatch: pytest.MonkeyPatch, how: str, capsys: Any) -> None:
    sign = run_dir.with_name("deadly")
    monkeypatch.setenv("DEADLY", str(sign))
    sign.touch()
    strategy = squall.Downpour(replicas=2, optimizer=partial(torch.optim.SGD, lr=0.05))
    with pytest.raises(ProcessLost, match=r"nursery.*was lost: killed by SIGKILL\ngo on from the beginning"):
        squall.fit(task, strategy, restarts=0, run_dir=run_dir)
    sign.touch()
    if how == "fit":
        run = squall.fit(task, strategy, restarts=1, run_dir=run_dir.with_name("another"))
    else:
        run = squall.resume(run_dir, restarts=1)
    assert run.summary().status == "finished"
    assert run.summary().examples == blobs.EXAMPLES
    assert not sign.exists()
    assert "(restart 1 of 1)" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [-1, 1.5])
def test_how_often_is_a_number(wrong: Any) -> None:
    with pytest.raises(ValueError, match="restarts is"):
        squall.Settings(restarts=wrong)


class Idle(LocalRun):
    """Nothing is started."""

    def __init__(self, several: bool = False, dies: bool = True, killed: bool = False) -> None:
        self._several, self._dies, self._killed = several, dies, killed

    @property
    def killed(self) -> bool:
        return self._killed

    @property
    def several(self) -> bool:
        return self._several

    def launch(self, directory: Path, snapshot: int | None, lock: int, again: Again) -> None:
        self.snapshot = snapshot

    def gone(self) -> bool:
        return self._dies

    def close(self) -> None:
        pass


LOST = ProcessLost("the nursery was lost")


def starts(path: Path, local: Idle, begun: bool = True) -> Starts:
    if begun:
        Record(path / "run.sqlite").close()
    found = Starts(path, 0, local, Idle, 3)
    found.launch(None)
    return found


def test_what_has_not_begun_and_what_is_on_several_machines_does_not_start_again(tmp_path: Path) -> None:
    with pytest.raises(ProcessLost, match=r"was lost$"):
        starts(tmp_path, Idle(), begun=False).again(LOST)
    starts(tmp_path, Idle(killed=True), begun=False).again(LOST)
    with pytest.raises(ProcessLost, match=r"was lost$"):
        starts(tmp_path, Idle(several=True)).again(LOST)


def test_nothing_starts_beside_processes_that_do_not_end(tmp_path: Path) -> None:
    with pytest.raises(ProcessLost, match="others of its processes do not end, so that it was not started again"):
        starts(tmp_path, Idle(dies=False)).again(LOST)


def test_a_new_snapshot_is_counted_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    numbers = iter([None, None, 1, 1, 1, 2, 2, 2, 2])
    monkeypatch.setattr(Snapshots, "newest", lambda snapshots: next(numbers))
    again = starts(tmp_path, Idle())
    said = []
    for _ in range(8):
        again.again(LOST)
        said.append(capsys.readouterr().err.partition("(restart ")[2])
    assert [int(text[0]) for text in said] == [1, 2, 1, 2, 3, 1, 2, 3]
    with pytest.raises(ProcessLost, match="it had been started again 3 times, without a new snapshot"):
        again.again(LOST)


def test_the_processes_of_a_nursery_are_gone_before_another_begins(endless: Started) -> None:
    before = endless.processes()
    new_snapshot(endless)
    endless.kill("nursery")
    wait_for(lambda: restarts(endless), START_S, "a restart")
    assert not any(alive(pid) for pid in before.values())
