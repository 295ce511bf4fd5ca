"""Who hangs is killed and replaced; who is slow is not, nor anybody because all stood still."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from squall.record.rows import EventRow, ProgressRow
from squall.report import Reader, audit
from tests import deep
from tests.launchers.processes import Started, send, wait_for
from tests.launchers.test_machines import cluster

TASK = Path(__file__).with_name("hanging.py")
SCRIPT = Path(__file__).with_name("hanging_script.py")
AFTER_S = 1.5
WITHIN_S = 30.0  # on a loaded machine


class Hanging(Started):
    folder: Path

    def events(self, kind: str) -> list[str]:
        return [row.text for row in self.rows(EventRow) if row.kind == kind]  # type: ignore[attr-defined]

    def wait_replaced(self, what: str) -> str:
        """Until it is. Returns why: nothing else has died."""
        wait_for(lambda: any(text == what for text in self.events("replaced")), WITHIN_S, f"another {what}")
        (died,) = self.events("lost")
        assert died.startswith(f"{what}: it hung: ")
        return died

    def hangs(self, role: str) -> None:
        """In its next loss."""
        (self.folder / role).touch()
        wait_for(lambda: not (self.folder / role).exists(), WITHIN_S, "it to hang")


@contextmanager
def training(tmp_path: Path, *flags: str, slow: float = 0.0, script: bool = False) -> Iterator[Hanging]:
    """Two replicas; behind it the run is stopped in order, and has lost nothing."""
    folder, directory = tmp_path / "hanging", tmp_path / f"run-{uuid4().hex[:8]}"
    folder.mkdir()
    if slow:
        (folder / "slow").write_text(str(slow))
    common = ("--replicas", "2", "--hang-after", str(AFTER_S), "--run-dir", str(directory), *flags)
    arguments = ("run", *common, str(SCRIPT)) if script else ("train", str(TASK), "--epochs", "1000", *common)
    run = Hanging(directory, *arguments, env={**os.environ, "HANGING": str(folder)})
    run.folder = folder
    try:
        for replica in range(2):
            run.wait_rows(ProgressRow, lambda row, replica=replica: row.replica == replica)
        yield run
        run.process.send_signal(signal.SIGINT)
        status, _, err = run.finish()
        assert status == 130, err
    finally:
        run.process.kill()
        run.process.communicate()
    wait_for(run.gone, 10, "the processes to end")
    with closing(Reader(directory / "run.sqlite")) as reader:
        assert not any(part.missed for part in audit(reader).parts)


@pytest.mark.parametrize("role", deep.sweep(["replica 1", "shard 0", "evaluator"], 1))
def test_who_is_stopped_is_replaced(tmp_path: Path, role: str) -> None:
    with training(tmp_path) as run:
        run.stop_waiting(role) if role == "shard 0" else run.kill(role, signal.SIGSTOP)  # over an update it would end
        assert "it was stopped for" in run.wait_replaced("evaluator 2" if role == "evaluator" else role)
        run.goes_on()


@pytest.mark.parametrize("strategy", deep.sweep(["downpour", "sandblaster", "all_reduce"], 1))
def test_a_loss_that_never_returns_is_noticed_and_who_waits_for_it_lives(tmp_path: Path, strategy: str) -> None:
    with training(tmp_path, "--strategy", strategy) as run:
        run.goes_on()  # its first steps have their time
        run.hangs("replica 1")
        assert "it made no step for" in run.wait_replaced("replica 1")
        run.goes_on()


@pytest.mark.parametrize("strategy", deep.sweep(["downpour", "all_reduce"], 1))
def test_a_part_that_is_stopped_takes_its_replica(tmp_path: Path, strategy: str) -> None:
    with training(tmp_path, "--strategy", strategy, "--parts", "2", "--threads", "1") as run:
        run.goes_on()
        run.kill("replica 1 part 1", signal.SIGSTOP)
        assert "it was stopped for" in run.wait_replaced("replica 1")
        run.goes_on()


@pytest.mark.parametrize("strategy", deep.sweep(["downpour", "all_reduce"], 1))
def test_a_script_that_is_stopped_is_replaced(tmp_path: Path, strategy: str) -> None:
    with training(tmp_path, "--strategy", strategy, script=True) as run:
        run.kill("replica 1", signal.SIGSTOP)
        assert "it was stopped for" in run.wait_replaced("replica 1")
        run.goes_on()


@deep.only
def test_a_script_in_a_group_may_be_away_and_is_waited_for(tmp_path: Path) -> None:
    """What it does then is its user's; the others' steps, which wait for it, are no reason either."""
    with training(tmp_path, "--strategy", "all_reduce", script=True) as run:
        said = run.folder / "said"
        said.write_text(str(2 * AFTER_S))
        said.rename(run.folder / "away")  # whole: the script may look at any moment
        wait_for(lambda: not (run.folder / "away").exists(), WITHIN_S, "it to be away")
        run.goes_on()
        run.goes_on()
        assert not run.events("lost")


def test_the_nursery_of_another_machine_watches_its_own(tmp_path: Path) -> None:
    flags = ("--replicas", "3", "--shards", "2", "--threads", "1", "--epochs", "100000", "--hang-after", str(AFTER_S))
    with cluster(tmp_path, 2, *flags) as found:
        found.event("started")
        nursery, (machine,) = found.run.processes()["nursery"], found.machines
        parent = lambda pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])  # noqa: E731
        there = {title: pid for title, pid in found.run.processes().items() if title.startswith("replica ")}
        title, pid = next((title, pid) for title, pid in there.items() if parent(pid) != nursery)
        os.kill(pid, signal.SIGSTOP)
        found.event("lost", f"{title}: it hung: it was stopped for")
        found.event("replaced", title)
        assert machine.process.poll() is None
        found.run.process.send_signal(signal.SIGINT)
        assert found.run.finish()[0] == 130


def test_a_slow_replica_is_left_alone(tmp_path: Path) -> None:
    """It takes longer for each batch than others may take."""
    with training(tmp_path, slow=AFTER_S + 0.5) as run:
        batches = lambda: sum(row.batches for row in run.rows(ProgressRow) if row.replica == 1)  # type: ignore[attr-defined]  # noqa: E731
        wait_for(lambda: batches() >= 4, 60, "its fourth batch")
        assert not run.events("lost")


@deep.only
def test_nobody_is_killed_because_all_stood_still(tmp_path: Path) -> None:
    with training(tmp_path) as run:
        processes = run.processes()
        assert "nursery" in processes
        send(processes.values(), signal.SIGSTOP)
        threading.Event().wait(2 * AFTER_S)  # that is what it is about
        send(processes.values(), signal.SIGCONT)
        run.goes_on()
        run.goes_on()
        assert not run.events("lost")


def test_a_coordinator_that_is_stopped_is_succeeded(tmp_path: Path) -> None:
    with training(tmp_path) as run:
        run.kill("coordinator", signal.SIGSTOP)
        assert "it was stopped for" in run.wait_replaced("coordinator 0")
        run.goes_on()
