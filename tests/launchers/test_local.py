"""The launching process's side of a run, with a nursery that says what it is told to."""

from collections.abc import Callable

import pytest

from squall.errors import ProcessLost
from squall.launchers import local
from squall.launchers.local import LocalRun
from squall.protocol.core import End

SPEAKER = """
import sys
from multiprocessing.connection import Connection
from squall.launchers.line import Line
line = Line(Connection(int(sys.argv[1])))
for said in {said}:
    line.say(**said)
"""
SHARD_LOST = {"kind": "exited", "node": "shard-0.0", "pid": 7, "why": "killed by SIGKILL", "traceback": ""}


@pytest.fixture
def run_that_says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LocalRun]:
    def start(*said: dict[str, object]) -> LocalRun:
        monkeypatch.setattr(local, "_ENTRY", SPEAKER.format(said=said))
        return LocalRun()

    return start


def attended(run: LocalRun) -> End:
    try:
        while run.ended is None:
            run.attend(10.0)
        return run.ended
    finally:
        run.close()


def test_a_shard_may_die_when_the_run_has_ended(run_that_says: Callable[..., LocalRun]) -> None:
    run = run_that_says(SHARD_LOST, {"kind": "ended", "status": "finished", "reason": "all data is trained"})
    assert attended(run) == End("finished", "all data is trained")


def test_a_run_that_failed_over_a_shard_names_it(run_that_says: Callable[..., LocalRun]) -> None:
    run = run_that_says(SHARD_LOST, {"kind": "ended", "status": "failed", "reason": "shard 0 was lost"})
    with pytest.raises(ProcessLost, match=r"shard 0 \(pid 7\) was lost: killed by SIGKILL"):
        attended(run)
