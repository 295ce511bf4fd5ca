"""A script where no coordinator is in charge: before its loop, and behind it. Real processes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from squall import Downpour
from squall.launchers import scripts
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.leaving import DONE
from squall.launchers.script_fellows import Fellows
from squall.protocol.nodes import Node
from squall.record.rows import ProgressRow
from squall.report import Reader, audit
from squall.run import Run
from tests import deep
from tests.launchers.processes import Started, alive, wait_for
from tests.launchers.test_scripts import started, weights

STOP_S = 10.0  # a full machine takes its time to end a process that has imported torch


def staying(tmp_path: Path, where: str) -> Started:
    """A run whose script stays there."""
    run = started(tmp_path, "--mode", f"stay {where}", "--stay", str(tmp_path / "here"))
    wait_for((tmp_path / "here").exists, 60, "the script to be there")
    return run


@pytest.mark.parametrize(("where", "number"), [("before", signal.SIGINT), ("between", signal.SIGTERM)])
def test_a_script_that_does_not_train_yet_is_ended_at_once(tmp_path: Path, where: str, number: signal.Signals) -> None:
    run = staying(tmp_path, where)
    run.process.send_signal(number)
    status, _, err = run.finish(STOP_S)
    assert status == 130
    assert err == "squall: interrupted before the training began\n"
    assert run.gone()
    assert not run.directory.exists()


@pytest.mark.parametrize("where", ["before", "between", "behind"])
def test_a_script_goes_with_the_launching_process(tmp_path: Path, where: str) -> None:
    run = staying(tmp_path, where)
    (nursery,) = map(int, Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split())
    run.process.kill()
    wait_for(lambda: not alive(nursery) and run.gone(), STOP_S, "the nursery and its scripts to end")
    if where == "behind":
        assert Run(run.directory).summary().status == "interrupted"
    run.finish()


def test_a_script_is_ended_behind_its_loop_by_the_first_interrupt(tmp_path: Path) -> None:
    run = staying(tmp_path, "behind")
    run.process.send_signal(signal.SIGINT)
    status, out, err = run.finish(STOP_S)
    assert status == 130, err
    assert "interrupted when the training was complete, and the script not at its end; go on from snapshot" in err
    assert len(weights(out)) == 1
    assert run.gone()
    assert Run(run.directory).summary().status == "interrupted"


@deep.only
def test_a_leader_that_is_killed_behind_its_loop_fails_the_run_and_a_resume_does_the_rest(tmp_path: Path) -> None:
    run = staying(tmp_path, "behind")
    pid = run.kill("replica 0")
    status, out, err = run.finish()
    assert status == 1
    assert f"the script of replica 0 (pid {pid}) did not come to its end: killed by SIGKILL" in err
    assert "the training is complete, in the last snapshot" in err
    assert len(weights(out)) == 1
    assert Run(run.directory).summary().status == "failed"
    status, again, err = Started(run.directory, "resume", str(run.directory)).finish()
    assert status == 0, err
    assert set(weights(again)) == set(weights(out))
    assert Run(run.directory).summary().status == "finished"
    reader = Reader(run.directory / "run.sqlite")
    assert audit(reader).complete
    reader.close()


@deep.only
def test_a_run_that_has_failed_does_not_wait_for_a_script_that_hangs(tmp_path: Path) -> None:
    run = started(tmp_path, "--mode", "stay within", "--stay", str(tmp_path / "here"), "--epochs", "100000")
    status, out, err = run.finish()
    assert status == 1, out
    assert "KeyError: 'in the loop'" in err
    assert run.gone()
    assert Run(run.directory).summary().status == "failed"


@deep.only
def test_an_interrupt_that_could_save_nothing_is_told_to_the_script_as_any_other(tmp_path: Path) -> None:
    run = started(tmp_path, "--mode", "catch", "--epochs", "100000")
    run.wait_rows(ProgressRow, lambda row: row.replica == 0)
    run.kill("shard 0", signal.SIGSTOP)
    run.process.send_signal(signal.SIGINT)
    wait_for(run.gone, STOP_S, "the processes to end")
    status, out, err = run.finish()
    assert status == 130
    assert err.startswith("squall: interrupted; shard 0 did not answer in time, so that nothing was saved"), err
    assert out.count("caught Interrupted, interrupted") == 2


def test_an_interrupt_that_python_would_ignore_ends_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    replica: Any = SimpleNamespace(ended_with=None)
    monkeypatch.setattr(scripts, "leave", left.append)
    alone = Fellows(Node("replica", 0), tmp_path)
    monkeypatch.setattr(sys, "unraisablehook", partial(scripts._unraisable, replica, alone))

    def batches() -> Iterator[int]:
        try:
            yield 0
        finally:
            signal.raise_signal(signal.SIGINT)

    for _ in batches():
        break
    assert left == [DONE]


def test_a_machine_without_room_is_no_mistake_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError("the arena of 5 MiB has no room")

    monkeypatch.setattr(scripts.Launching, "run", no_room)
    (tmp_path / "script.py").write_text("import squall, torch\nsquall.join(torch.nn.Linear(2, 2))")
    message = {
        "machines": True, "strategy": Downpour(replicas=1), "optimizer_chosen": True, "script": tmp_path / "script.py",
        "text": (tmp_path / "script.py").read_text(), "arguments": [], "plan": SimpleNamespace(seed=0),
    }  # fmt: skip
    with pytest.raises(OSError, match="the arena of 5 MiB has no room"):
        scripts.serve_script(ControlPipe(Pipe()[0]), message, tmp_path)
