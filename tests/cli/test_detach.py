"""Runs that go on without a terminal, and the commands that find them: real processes, as users start them."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from squall.cli import main
from squall.detaching import FILE as LEFT
from squall.record.rows import ProgressRow
from squall.runtime.lock import hold, holders
from squall.runtime.processes import identity
from squall.runtime.running import STOPPING
from squall.runtime.snapshot import Snapshots
from tests.launchers.processes import FILE, START_S, Started, alive, wait_for
from tests.launchers.test_scripts import SCRIPT
from tests.warm import Warm
from tests.warm import squall as command

BAD = """
import os, signal, threading
from pathlib import Path
import squall
from tests.launchers import blobs

def broken():
    raise RuntimeError("my own mistake")

def waiting():
    Path("here").touch()
    threading.Event().wait()

def later():
    made = blobs.task()
    def loss(model, batch):
        loss.batches += 1
        if loss.batches > 20:
            raise RuntimeError("my own loss")
        return made.loss(model, batch)
    loss.batches = 0
    return squall.Task(model=made.model, loss=loss, train=made.train, batch_size=16)
"""


def detached(directory: Path, *flags: str, **options: Any) -> Started:
    """Up to the end of the command, which is that of all that holds its outputs."""
    run = Started.train(directory, "--detach", *flags, **options)
    status, out, err = run.finish()
    assert status == 0, err
    run.pid = int(re.search(r"pid (\d+)\)", out)[1])  # type: ignore[attr-defined, index]
    return run


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Of a run of which nothing is left behind the test."""
    path = tmp_path / f"run-{uuid4().hex[:8]}"
    yield path
    for pid in holders(path / "lock"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not holders(path / "lock"), 10, "all processes to end")


@pytest.fixture
def endless(directory: Path) -> Started:
    return detached(directory, "--epochs", "100000", "--snapshot-every-s", "0.5")


def runs(*arguments: object) -> list[dict[str, Any]]:
    done = command("ps", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def status_of(directory: Path) -> str:
    (found,) = runs(directory, "--all")
    return str(found["status"])


def test_a_detached_run_is_a_session_of_its_own_and_its_files_are_private(endless: Started) -> None:
    pid = endless.pid  # type: ignore[attr-defined]
    assert os.getsid(pid) == pid
    assert {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (1, 2)} == {str(endless.directory / "log.txt")}
    for other in endless.processes().values():
        assert os.readlink(f"/proc/{other}/fd/1") == str(endless.directory / "log.txt")
    for name in ("log.txt", LEFT, "lock"):
        assert stat.S_IMODE((endless.directory / name).stat().st_mode) == 0o600
    (found,) = runs(endless.directory)
    assert (found["pid"], found["status"], found["strategy"]) == (pid, "running", "downpour")
    assert re.fullmatch(r"epoch [\d.]+ of 100,000", found["progress"])
    listed = command("ps").stdout
    assert re.search(rf"{endless.directory} +\d+\.\d s ago +downpour +epoch .* +running +{pid}\n", listed), listed
    assert [run["pid"] for run in runs(endless.directory.parent)] == [pid]
    assert "Epoch 0" in command("report", endless.directory, "--audit").stdout


def test_it_goes_on_when_its_terminal_and_all_of_that_are_killed(directory: Path) -> None:
    shell = f"squall train {FILE} --run-dir {directory} --epochs 100000 --detach; echo said; cat"
    code = "import os, pty, sys; os.write(2, b'%d ' % os.getpid()); pty.spawn(sys.argv[1:])"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    terminal = subprocess.Popen(
        [sys.executable, "-c", code, "sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PATH": path}, start_new_session=True,
    )  # fmt: skip
    assert terminal.stdout is not None
    assert any(line.strip() == "said" for line in terminal.stdout)
    (group,) = map(int, Path(f"/proc/{terminal.pid}/task/{terminal.pid}/children").read_text().split())
    os.killpg(group, signal.SIGKILL)  # the shell and whatever it has started
    terminal.kill()  # its terminal is gone: whoever is left in its session hears a hangup
    terminal.communicate()
    run = Started.__new__(Started)
    run.directory = directory
    run.goes_on()
    assert command("stop", directory).returncode == 0
    assert run.gone()


def test_a_terminal_that_goes_before_the_training_takes_the_run_with_it(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "job.py").write_text(BAD)
    run = Started(directory, "train", "job.py:waiting", "--run-dir", str(directory), "--detach", cwd=tmp_path)
    wait_for((tmp_path / "here").exists, START_S, "the task")
    (daemon,) = map(int, Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split())
    run.process.kill()
    wait_for(lambda: not alive(daemon), START_S, "the launching process to end")
    run.finish()
    assert not directory.exists()


def test_an_interrupt_before_the_training_reaches_it(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "job.py").write_text(BAD)
    run = Started(directory, "train", "job.py:waiting", "--run-dir", str(directory), "--detach", cwd=tmp_path)
    wait_for((tmp_path / "here").exists, START_S, "the task")
    run.process.send_signal(signal.SIGINT)
    status, out, err = run.finish()
    assert (status, out, err) == (130, "", "squall: interrupted\n")
    assert not directory.exists()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["job.py:broken"], 1, "my own mistake"),
        (["job.py:missing"], 1, "missing"),
        (["job.py:later", "--epoch", "many"], 2, "invalid int value: 'many'"),
        (["job.py:later", "--live"], 1, "--detach leaves no terminal for the link of --live: leave that out"),
    ],
)
def test_what_is_wrong_before_the_training_is_seen(
    tmp_path: Path, directory: Path, arguments: list[str], status: int, said: str
) -> None:
    (tmp_path / "job.py").write_text(BAD)
    done = command("train", "--detach", "--run-dir", directory, *arguments, cwd=tmp_path)
    assert done.returncode == status
    assert said in done.stderr
    assert done.stdout == ""
    assert not directory.exists()


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
    begun = command("train", "job.py:later", "--run-dir", directory, "--detach", cwd=tmp_path)
    attached = command("attach", directory, "--quiet")
    if begun.returncode == 0:
        assert attached.returncode == 1
        assert "my own loss" in attached.stderr
        assert "mend it, and go on" in attached.stderr
        assert "my own loss" in (directory / "log.txt").read_text()
    else:  # it was sooner over than it was seen to begin
        assert "my own loss" in begun.stderr


def test_two_who_stop_at_once_get_one_orderly_end_and_it_can_go_on(endless: Started) -> None:
    both = [Warm(("stop", str(endless.directory))) for _ in range(2)]
    for each in both:
        out, err = each.communicate(timeout=START_S)
        assert (each.returncode, err) == (0, "")
        number = Snapshots(endless.directory).numbers()[-1]
        go_on = f"go on from snapshot {number} with: squall resume {endless.directory}"
        assert out == f"{endless.directory} is over (interrupted: interrupted); {go_on}\n"
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
    assert done.stdout.startswith(f"{endless.directory} is over (killed); ")
    assert f"go on from snapshot {snapshots.numbers()[-1]} with: squall resume" in done.stdout
    assert endless.gone()
    assert not alive(endless.pid)  # type: ignore[attr-defined]
    attached = command("attach", endless.directory)
    assert attached.returncode == 1
    assert "are gone, without a word of its end" in attached.stderr
    assert status_of(endless.directory) == "lost"


def test_a_run_without_its_launching_process_ends_by_itself_and_is_waited_for(endless: Started) -> None:
    os.kill(endless.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    done = command("stop", endless.directory)
    assert done.returncode == 0
    assert "interrupted: the launching process is gone" in done.stdout
    assert endless.gone()
    attached = command("attach", endless.directory)
    assert attached.returncode == 130
    assert "the launching process is gone" in attached.stderr


def test_a_nursery_is_lost_without_a_terminal(endless: Started) -> None:
    wait_for(Snapshots(endless.directory).numbers, START_S, "a snapshot")
    endless.kill("nursery")
    wait_for(lambda: "restart 1 of 3" in (endless.directory / "log.txt").read_text(), START_S, "a restart")
    wait_for(lambda: "coordinator" in endless.processes(), START_S, "its processes")
    endless.goes_on()
    for pid in endless.processes().values():
        assert os.readlink(f"/proc/{pid}/fd/2") == str(endless.directory / "log.txt")


@pytest.mark.parametrize("flags", [("--strategy", "single_process"), ("--launcher", "inline")])
def test_a_run_in_one_process_goes_on_and_is_stopped(directory: Path, flags: tuple[str, ...]) -> None:
    run = detached(directory, "--epochs", "100000", *flags)
    run.wait_rows(ProgressRow, lambda row: True)
    assert command("stop", directory).returncode == 0
    assert not alive(run.pid)  # type: ignore[attr-defined]
    assert command("attach", directory).returncode == 130


def test_a_script_goes_on_and_prints_into_its_log(directory: Path) -> None:
    done = command("run", "--run-dir", directory, "--detach", SCRIPT, "--epochs", "60")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("before\n"), "what is in front of squall.join is seen"
    attached = command("attach", directory)
    assert attached.returncode == 0, attached.stderr
    assert "finished" in attached.stdout
    assert "weights" in (directory / "log.txt").read_text()


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
