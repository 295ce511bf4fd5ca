"""The launching process's side of a run, with a nursery that says what it is told to."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from squall.errors import ProcessLost, SquallError
from squall.evaluation_callback import EvaluationCallback
from squall.launchers import nursery_process
from squall.launchers.local import ANSWER_WITHIN_S, INSISTED_S, LocalRun
from squall.protocol.effects import End
from squall.record.rows import RecordError
from squall.usercode.blame import encode
from tests.launchers.processes import wait_for

pytestmark = pytest.mark.cold  # what is started here is another nursery

SPEAKER = """
import sys
from multiprocessing.connection import Connection
from squall.launchers.control_pipe import ControlPipe
line = ControlPipe(Connection(int(sys.argv[1])))
for said in {said}:
    line.say(**said)
"""
# Has a child, stops itself, and would say more later.
STOPPED = """
import os, signal, sys
from multiprocessing.connection import Connection
from squall.launchers.control_pipe import ControlPipe
line = ControlPipe(Connection(int(sys.argv[1])))
if pid := os.fork():
    line.say(kind="listening")
    line.say(kind="exited", node="replica-0.0", pid=pid, why="", traceback="")
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    signal.pause()
"""
SHARD_LOST = {"kind": "exited", "node": "shard-0.0", "pid": 7, "why": "killed by SIGKILL", "traceback": ""}


@pytest.fixture
def run_that_says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LocalRun]:
    def start(*said: dict[str, object]) -> LocalRun:
        monkeypatch.setattr(nursery_process, "_ENTRY", SPEAKER.format(said=said))
        return LocalRun()

    return start


@pytest.mark.parametrize(("stops", "within_s"), [(1, ANSWER_WITHIN_S), (2, INSISTED_S)])
def test_a_nursery_that_does_not_answer_is_killed_with_all_its_children(
    stops: int, within_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nursery_process, "_ENTRY", STOPPED)
    run = LocalRun()
    while not run._exits.told:
        run.attend(10.0, EvaluationCallback())
    child = run._exits.told[0]["pid"]
    wait_for(run.standing_still, 10.0, "it to stand still")
    assert run.standing_still()[0].endswith(f"(pid {run._nursery.pid}) is stopped: kill -CONT {run._nursery.pid}")
    began = time.monotonic()
    for _ in range(stops):
        run.stop()
    while run.ended is None:
        run.attend(0.1, EvaluationCallback())
    assert time.monotonic() - began < within_s + 0.5
    assert run.ended.status == "interrupted"
    assert run.ended.reason.endswith("did not answer, and was killed" if stops == 1 else "interrupted at once")
    wait_for(lambda: not lives(child), 1.0, "its child to be gone")
    run.close()


def lives(pid: int) -> bool:
    """Here nobody may take notice of an orphan's end: a zombie is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def attended(run: LocalRun) -> End:
    try:
        while run.ended is None:
            run.attend(10.0, EvaluationCallback())
        return run.ended
    finally:
        run.close()


def test_a_shard_may_die_when_the_run_has_ended(run_that_says: Callable[..., LocalRun]) -> None:
    run = run_that_says(SHARD_LOST, {"kind": "ended", "status": "finished", "reason": "all data is trained"})
    assert attended(run) == End("finished", "all data is trained")


def test_a_record_that_cannot_be_written_is_told_without_a_traceback(run_that_says: Callable[..., LocalRun]) -> None:
    error = encode(RecordError("cannot open run.sqlite: the remedy"))
    lost = {"kind": "exited", "node": "coordinator-0.0", "pid": 7, "why": "", "traceback": error}
    run = run_that_says(lost, {"kind": "ended", "status": "", "reason": ""})
    with pytest.raises(SquallError) as caught:
        attended(run)
    assert (
        str(caught.value)
        == "the coordinator failed\nsquall.record.rows.RecordError: cannot open run.sqlite: the remedy"
    )


def test_a_start_that_dies_early_leaves_nothing_in_the_temporary_folder(
    tmp_path: Path, run_that_says: Callable[..., LocalRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = run_that_says({"kind": "exited"})
    run.attend(10.0, EvaluationCallback())
    assert list(tmp_path.iterdir()) == []
    run.close()


def test_a_run_that_failed_over_a_shard_names_it(run_that_says: Callable[..., LocalRun]) -> None:
    run = run_that_says(SHARD_LOST, {"kind": "ended", "status": "failed", "reason": "shard 0 was lost"})
    with pytest.raises(ProcessLost, match=r"shard 0 \(pid 7\) was lost: killed by SIGKILL"):
        attended(run)


def test_of_several_lost_shards_the_one_is_named_that_ended_the_run(run_that_says: Callable[..., LocalRun]) -> None:
    lost = [{**SHARD_LOST, "node": f"shard-{index}.0", "pid": pid} for index, pid in ((10, 8), (1, 7))]
    run = run_that_says(*lost, {"kind": "ended", "status": "failed", "reason": "shard 10 was lost (killed by SIGKILL)"})
    with pytest.raises(ProcessLost, match=r"shard 10 \(pid 8\) was lost: killed by SIGKILL"):
        attended(run)
