"""`squall train --detach`: the run goes on without its terminal. Real processes, as users start them."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from squall.detaching import FILE as LEFT
from squall.detaching import detached as left
from squall.detaching import succeeded
from squall.record.rows import LeaseRow, ProgressRow
from squall.run import Run
from squall.runtime.snapshot import Snapshots
from tests import deep
from tests.cli.detached import BAD, detached, runs
from tests.launchers.blobs import EXAMPLES
from tests.launchers.processes import FILE, START_S, Started, alive, send, wait_for
from tests.launchers.test_scripts import SCRIPT
from tests.warm import Warm
from tests.warm import squall as command


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
    endless.wait_rows(LeaseRow, lambda row: True)
    assert " of 4,096 " in command("report", endless.directory, "--audit").stdout  # of an epoch, finished or not


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


def test_a_nursery_is_lost_without_a_terminal(endless: Started) -> None:
    wait_for(Snapshots(endless.directory).numbers, START_S, "a snapshot")
    attached = Warm(("attach", str(endless.directory)))
    assert any("examples/s" in line for line in attached.stderr)
    endless.kill("nursery")
    wait_for(lambda: "restart 1 of 3" in (endless.directory / "log.txt").read_text(), START_S, "a restart")
    wait_for(lambda: "coordinator" in endless.processes(), START_S, "its processes")
    endless.goes_on()
    for pid in endless.processes().values():
        assert os.readlink(f"/proc/{pid}/fd/2") == str(endless.directory / "log.txt")
    assert command("stop", endless.directory).returncode == 0
    _, told = attached.communicate(timeout=START_S)
    assert told.count("the nursery (pid") == 1, "what has happened is shown once"
    trained = sum(row.examples for row in endless.rows(ProgressRow))  # type: ignore[attr-defined]
    (last,) = re.findall(r"epoch ([\d,.]+) of", told.splitlines()[-2])
    assert float(last.replace(",", "")) == pytest.approx(trained / EXAMPLES, abs=0.6), "the record went back"


def test_a_launching_process_that_is_killed_is_succeeded_as_often_as_it_is(endless: Started) -> None:
    attached = Warm(("attach", str(endless.directory)))
    assert any("examples/s" in line for line in attached.stderr)
    for _ in range(2):
        endless.goes_on()
        killed = runs(endless.directory)[0]["pid"]
        os.kill(killed, signal.SIGKILL)
        wait_for_another(endless.directory, killed)
    endless.goes_on()
    log = (endless.directory / "log.txt").read_text()
    assert re.findall(r"the launching process \(pid \d+\) was killed; going on from snapshot \d+\n", log), log
    assert command("stop", endless.directory).returncode == 0
    assert endless.gone()
    assert not succeeded(endless.directory)
    _, told = attached.communicate(timeout=START_S)
    assert attached.returncode == 130
    assert told.count("the launching process is gone") == 2, told
    assert "trained more than once" not in command("report", endless.directory, "--audit").stdout


def wait_for_another(directory: Path, than: int) -> None:
    """Launching process, under which it trains."""

    def found() -> bool:
        return any(run["pid"] not in (0, than) and run["status"] == "running" for run in runs(directory))

    wait_for(found, START_S, "another launching process")


def keeper_of(directory: Path) -> int:
    """When it is there."""
    known = left(directory)
    assert known is not None
    keeper = int(known.keeper.split()[0])
    wait_for(lambda: b"squall.keeper" in Path(f"/proc/{keeper}/cmdline").read_bytes(), START_S, "the keeper")
    return keeper


@pytest.mark.parametrize("how", ["keeper", "stop", "now", "asleep", "told"])
def test_nobody_succeeds_a_launching_process(endless: Started, how: str) -> None:
    keeper, pid = keeper_of(endless.directory), endless.pid  # type: ignore[attr-defined]
    match how:
        case "keeper":  # is killed before
            os.kill(keeper, signal.SIGKILL)
            endless.goes_on()
            os.kill(pid, signal.SIGKILL)
        case "stop":  # is asked for behind the death
            os.kill(pid, signal.SIGKILL)
            done = command("stop", endless.directory)
            assert "is over (interrupted: the launching process is gone" in done.stdout, done.stdout
        case "now":
            assert command("stop", "--now", endless.directory).returncode == 0
        case "asleep":  # as all of a session may be
            send([keeper, pid], signal.SIGSTOP)
            assert command("stop", "--now", endless.directory).returncode == 0
        case "told":  # to end, and killed over that
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGKILL)
            wait_for(endless.gone, START_S, "the orderly end")
            if "the launching process is gone" in Run(endless.directory).summary().reason:  # it had not heard of it
                assert command("stop", endless.directory).returncode == 0
    wait_for(lambda: not alive(keeper) and endless.gone(), START_S, "the end")
    assert not succeeded(endless.directory)


def test_a_keeper_lets_a_run_be_that_somebody_has_launched_anew(endless: Started) -> None:
    keeper = keeper_of(endless.directory)
    os.kill(keeper, signal.SIGSTOP)  # it comes too late
    os.kill(endless.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    wait_for(endless.gone, START_S, "the orderly end")
    again = Started(endless.directory, "resume", str(endless.directory))
    endless.wait_rows(ProgressRow, lambda row: True)
    wait_for(lambda: "coordinator" in again.processes(), START_S, "the resumed run")
    os.kill(keeper, signal.SIGCONT)
    wait_for(lambda: not alive(keeper), START_S, "the keeper's end")
    again.goes_on()
    again.process.send_signal(signal.SIGINT)
    assert again.finish()[0] == 130


MOVES = """
import os
from pathlib import Path
import torch
import squall

os.chdir("elsewhere")

def loss(model, batch):
    if Path("now").exists():
        raise SystemExit("my own end")
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

def task():
    labels = torch.arange(4096) % 8
    train = torch.utils.data.TensorDataset(torch.nn.functional.one_hot(labels).float(), labels)
    return squall.Task(model=torch.nn.Linear(8, 8), loss=loss, train=train, batch_size=16)
"""


@deep.only
def test_it_is_succeeded_where_it_began_wherever_the_task_has_gone(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "job.py").write_text(MOVES)
    (tmp_path / "elsewhere").mkdir()
    lasts = ("--epochs", "100000", "--seconds", "5", "--snapshot-every-s", "0.5", "--detach", "--json")
    done = command("train", "job.py", "--run-dir", str(directory), *lasts, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    killed = json.loads(done.stdout)["pid"]
    wait_for(Snapshots(directory).numbers, START_S, "a snapshot")
    os.kill(killed, signal.SIGKILL)
    attached = command("attach", directory, "--quiet")
    assert attached.returncode == 0, attached.stderr
    assert json.loads(attached.stdout)["status"] == "finished"
    assert "was killed; going on from snapshot" in (directory / "log.txt").read_text()


def test_who_ends_by_the_users_own_code_is_not_succeeded(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "job.py").write_text(MOVES)
    (tmp_path / "elsewhere").mkdir()
    flags = ("--run-dir", directory, "--epochs", "100000", "--snapshot-every-s", "0.2", "--detach")
    done = command("train", "job.py", "--strategy", "single_process", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    wait_for(Snapshots(directory).numbers, START_S, "a snapshot")
    keeper = keeper_of(directory)
    (tmp_path / "elsewhere" / "now").touch()
    wait_for(lambda: not alive(keeper), START_S, "the keeper's end")
    assert not runs(directory)
    assert "was killed" not in (directory / "log.txt").read_text()
    assert "my own end" in command("attach", directory).stderr


@deep.only
def test_one_process_that_is_killed_goes_on_behind_a_snapshot_of_its_own(directory: Path) -> None:
    run = detached(directory, "--epochs", "100000", "--strategy", "single_process", "--snapshot-every-s", "0.5")
    wait_for(Snapshots(directory).numbers, START_S, "a snapshot")
    run.goes_on()
    killed = run.pid  # type: ignore[attr-defined]
    os.kill(killed, signal.SIGKILL)
    wait_for_another(directory, killed)
    run.goes_on()
    assert "was killed; going on from snapshot" in (directory / "log.txt").read_text()
    assert command("stop", directory).returncode == 0


def test_one_process_that_is_killed_before_its_first_snapshot_is_not_tried_for_ever(directory: Path) -> None:
    flags = ("--epochs", "100000", "--strategy", "single_process", "--snapshot-every-s", "1000")
    run = detached(directory, *flags)
    run.wait_rows(ProgressRow, lambda row: True)
    os.kill(run.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    wait_for(lambda: not succeeded(directory), START_S, "the keeper's end")
    assert not runs(directory)
    attached = command("attach", directory)
    assert "are gone, without a word of its end" in attached.stderr


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
