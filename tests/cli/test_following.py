"""`squall attach` and `squall stop`: a run that another process has launched. Real processes, as users start them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from squall.cli import main
from squall.detaching import FILE as LEFT
from squall.record.rows import ProgressRow
from squall.runtime.lock import hold, holders
from squall.runtime.processes import identity
from squall.runtime.running import STOPPING
from squall.runtime.snapshot import Snapshots
from tests.cli.detached import BAD, detached, status_of
from tests.launchers.processes import FILE, START_S, Started, alive, wait_for
from tests.warm import Warm
from tests.warm import squall as command


def test_attach_shows_the_run_and_has_its_result_and_status(directory: Path) -> None:
    detached(directory, "--seconds", "3", "--epochs", "100000")
    attached = command("attach", directory)
    assert attached.returncode == 0
    assert re.search(r"^\d+\.\d s +epoch [\d.]+ of 100,000 .* examples/s +loss", attached.stderr, re.MULTILINE)
    assert " status " in attached.stdout
    assert "finished" in attached.stdout
    assert attached.stdout in (directory / "log.txt").read_text()
    again = command("attach", directory)
    assert (again.returncode, again.stdout, again.stderr) == (0, attached.stdout, "")
    (directory / LEFT).unlink()  # a run that had a terminal has left its record alone
    assert command("attach", directory).stdout == attached.stdout
    assert status_of(directory) == "finished"


def test_ctrl_c_leaves_the_run_that_is_attached_to_and_its_end_is_told(endless: Started) -> None:
    attached = Warm(("attach", str(endless.directory)))
    assert any("examples/s" in line for line in attached.stderr)
    attached.send_signal(signal.SIGINT)
    _, err = attached.communicate(timeout=START_S)
    assert attached.returncode == 130
    assert err.endswith(f"squall: {endless.directory} goes on; to end it: squall stop {endless.directory}\n")
    endless.goes_on()
    attached = Warm(("attach", str(endless.directory)))
    assert any("examples/s" in line for line in attached.stderr)
    os.kill(endless.pid, signal.SIGTERM)  # type: ignore[attr-defined]
    _, err = attached.communicate(timeout=START_S)
    assert attached.returncode == 130
    assert re.search(rf"squall: interrupted; .*with: squall resume {endless.directory}\n$", err)


def test_an_error_of_the_users_is_told_by_attach(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "job.py").write_text(BAD)
    flags = ("--epochs", "100000", "--detach")
    begun = command("train", "job.py:later", "--run-dir", directory, *flags, cwd=tmp_path)
    assert begun.returncode == 0, begun.stderr
    (tmp_path / "now").touch()
    attached = command("attach", directory, "--quiet")
    assert attached.returncode == 1
    assert "my own loss" in attached.stderr
    assert "mend it, and go on" in attached.stderr
    assert attached.stderr in (directory / "log.txt").read_text()


def test_two_who_stop_at_once_get_one_orderly_end_and_it_can_go_on(endless: Started) -> None:
    both = [Warm(("stop", str(endless.directory))) for _ in range(2)]
    said = set()
    for each in both:
        out, err = each.communicate(timeout=START_S)
        assert (each.returncode, err) == (0, "")
        number = Snapshots(endless.directory).numbers()[-1]
        go_on = f"go on from snapshot {number} with: squall resume {endless.directory}"
        begin, _, end = out.removeprefix(f"{endless.directory} ").partition(" (")
        assert end == f"interrupted: interrupted); {go_on}\n"
        said.add(begin)
    assert said in ({"is over"}, {"is over", "was over already"}), "one may have come late"
    assert endless.gone()
    assert not alive(endless.pid)  # type: ignore[attr-defined]
    over = command("stop", endless.directory)
    assert (over.returncode, over.stdout.split(" (")[0]) == (0, f"{endless.directory} was over already")
    again = command("resume", endless.directory, "--detach", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["run_directory"] == str(endless.directory)
    endless.goes_on()
    assert status_of(endless.directory) == "running", "the stop was of an earlier launch"
    assert command("stop", endless.directory).returncode == 0
    assert command("attach", endless.directory).returncode == 130


def test_one_object_comes_from_the_command_and_one_from_who_attaches(directory: Path) -> None:
    done = command("train", FILE, "--run-dir", directory, "--seconds", "1", "--detach", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    begun = json.loads(done.stdout)
    assert begun["run_directory"] == str(directory)
    attached = command("attach", directory, "--quiet")
    assert (attached.returncode, attached.stderr) == (0, "")
    assert json.loads(attached.stdout)["status"] == "finished"


def test_now_kills_and_says_what_was_kept(endless: Started) -> None:
    snapshots = Snapshots(endless.directory)
    wait_for(snapshots.numbers, START_S, "a snapshot")
    done = command("stop", endless.directory, "--now")
    assert done.returncode == 0
    quick = status_of(endless.directory) == "lost"  # the others may have ended in order before they were killed
    assert done.stdout.startswith(f"{endless.directory} is over ({'killed' if quick else 'interrupted'}")
    assert f"go on from snapshot {snapshots.numbers()[-1]} with: squall resume" in done.stdout
    assert endless.gone()
    assert not alive(endless.pid)  # type: ignore[attr-defined]
    attached = command("attach", endless.directory)
    assert attached.returncode == (1 if quick else 130)
    assert ("are gone, without a word of its end" in attached.stderr) == quick


def test_a_run_without_its_launching_process_ends_by_itself_and_is_waited_for(directory: Path) -> None:
    run = detached(directory, "--epochs", "100000", "--restarts", "0")
    os.kill(run.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    done = command("stop", directory)
    assert done.returncode == 0
    assert "interrupted: the launching process is gone" in done.stdout
    assert run.gone()
    attached = command("attach", directory)
    assert attached.returncode == 130
    assert "the launching process is gone" in attached.stderr


def test_a_run_with_a_terminal_is_attached_to_and_stopped_as_well(directory: Path) -> None:
    run = Started.train(directory, "--epochs", "100000")
    run.wait_rows(ProgressRow, lambda row: True)
    attached = Warm(("attach", str(directory)))
    assert any("examples/s" in line for line in attached.stderr)
    assert command("stop", directory).returncode == 0
    status, _, err = run.finish()
    assert status == 130
    _, told = attached.communicate(timeout=START_S)
    assert attached.returncode == 130
    assert told.splitlines()[-1] == err.splitlines()[-1]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands in this process, which has nothing to start."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("what", ["attach", "stop"])
def test_no_run_is_said_to_be_none(here: Path, capsys: Any, what: str) -> None:
    (here / "empty").mkdir()
    for name in ("missing", "empty"):
        assert main([what, name]) == 1
        assert f"no run at {name}: give the folder of a run" in capsys.readouterr().err
    assert main(["ps", "missing"]) == 1
    assert "there is no directory missing" in capsys.readouterr().err


def run_like(path: Path) -> None:
    """A directory as a run has it that was killed before its training."""
    path.mkdir()
    (path / "run.json").write_text("{}")
    with hold(path):
        pass


@pytest.fixture
def other() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a process that has nothing to do with any run."""
    with ExitStack() as stack:

        def start(**options: Any) -> subprocess.Popen[bytes]:
            process = stack.enter_context(subprocess.Popen(["sleep", "1000"], **options))
            stack.callback(process.kill)
            return process

        yield start


@pytest.mark.parametrize("same", [True, False], ids=["it lives", "another has its number"])
def test_a_pid_in_a_lock_is_not_trusted(here: Path, capsys: Any, same: bool, other: Any) -> None:
    """Of a process that does not belong to the run: it is not asked to stop, not killed, and not waited for."""
    run_like(here / "r")
    process = other()
    (here / "r" / "lock").write_text(identity(process.pid) if same else f"{process.pid} 1")
    assert main(["stop", "r"]) == 0
    assert main(["stop", "r", "--now"]) == 0
    assert capsys.readouterr().out == 2 * "r was over already: nothing was trained\n"
    assert main(["attach", "r"]) == 1
    assert "r has ended before the training began" in capsys.readouterr().err
    assert main(["ps", "."]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == []
    assert main(["ps", "--all", "."]) == 0
    assert re.search(r"^r .* lost$", capsys.readouterr().out, re.MULTILINE)
    assert process.poll() is None
    assert not (here / "r" / STOPPING).exists()


def test_who_only_looks_at_a_lock_does_not_hold_it(here: Path, other: Any) -> None:
    run_like(here / "r")
    with open(here / "r" / "lock") as looking:
        other(pass_fds=[looking.fileno()])
    assert holders(here / "r" / "lock") == {}


def test_a_record_counts_as_a_run_though_there_is_no_lock(here: Path, capsys: Any, inline: Any) -> None:
    import squall
    from tests.tasks import regression

    run = inline(regression(), squall.SingleProcess(), epochs=1)
    (run.directory / "lock").unlink()
    assert main(["attach", str(run.directory)]) == 0
    assert "finished: all data is trained" in capsys.readouterr().out
    assert main(["stop", str(run.directory)]) == 0
    assert capsys.readouterr().out == f"{run.directory} was over already (finished: all data is trained)\n"
