"""What `squall chaos` sees and does from outside, each by itself; `tests/cli/test_cli_chaos.py` has whole runs."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from squall.chaos.faults import FILL_DISK, KILL, PAUSE, Fault, Injury, bring
from squall.chaos.outcome import Outcome
from squall.chaos.processes import Family
from squall.chaos.updates import LOOK_EVERY, Updates
from squall.runtime.schedule import FIRST_BYTES, PIECE, ScheduleWriter
from tests.launchers.processes import wait_for
from tests.report.conftest import lease, state, work, write

TITLED = (
    "import signal, sys; from setproctitle import setproctitle\n"
    "setproctitle(f'squall {sys.argv[1]} of here'); print(flush=True); signal.pause()"
)
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {TITLED!r}, sys.argv[1]])
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["replica 3"])
def parent(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """One that has a process with the title of a replica, or of another role."""
    command = [sys.executable, "-c", PARENT, request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        family = Family(process.pid)
        wait_for(lambda: family.of("any"), 10.0, "the title")
        yield process
        for found in family.look():
            bring(Fault(KILL), family, random.Random(0), 0.0)
            wait_for(lambda found=found: not found.lives, 10.0, "its end")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_processes_are_known_by_their_titles_also_when_their_parent_has_died(parent: subprocess.Popen[bytes]) -> None:
    family = Family(parent.pid)
    (found,) = family.of("replica")
    assert (found.name, found.role) == ("replica 3", "replica")
    assert family.of("any") == [found]
    assert not family.of("shard")
    parent.kill()
    parent.wait()
    assert family.look() == [found], "who is left behind"


@pytest.mark.parametrize("parent", ["nursery"], indirect=True)
def test_no_machine_is_lost_before_the_last_that_was_has_a_successor(parent: subprocess.Popen[bytes]) -> None:
    family, chance = Family(parent.pid), random.Random(0)
    for role in ("nursery", "any"):
        assert bring(Fault(KILL, role), family, chance, 1.0, whole=False) is None
    assert bring(Fault(KILL, "nursery"), family, chance, 1.0) is not None


def test_a_pause_and_a_full_disk_heal(parent: subprocess.Popen[bytes]) -> None:
    family, chance = Family(parent.pid), random.Random(0)
    (found,) = family.look()
    paused = bring(Fault(PAUSE, "replica"), family, chance, 1.0)
    assert paused is not None
    assert paused.heal is not None
    assert paused.text == f"replica 3 (pid {found.pid}) stands still"
    wait_for(lambda: state_of(found.pid) == "T", 10.0, "it to stop")
    paused.heal()
    wait_for(lambda: state_of(found.pid) != "T", 10.0, "it to go on")
    before = resource.prlimit(found.pid, resource.RLIMIT_FSIZE)
    full = bring(Fault(FILL_DISK), family, chance, 1.0)
    assert full is not None
    assert full.heal is not None
    assert resource.prlimit(found.pid, resource.RLIMIT_FSIZE)[0] == 1
    full.heal()
    assert resource.prlimit(found.pid, resource.RLIMIT_FSIZE) == before


def test_nobody_is_hit_where_nobody_is(parent: subprocess.Popen[bytes]) -> None:
    family, chance = Family(parent.pid), random.Random(0)
    assert bring(Fault(KILL, "shard"), family, chance, 0.0) is None
    killed = bring(Fault(KILL, "replica"), family, chance, 0.0)
    assert killed is not None
    assert killed.heal is None
    wait_for(lambda: not family.look(), 10.0, "its end")


# ---------------------------------------------------------------- updates


@pytest.mark.parametrize("record", [[6, 1, 0], [6, "x" * 300]], ids=["short", "long"])
def test_each_push_in_the_schedule_is_seen_once_also_when_the_file_begins_anew(
    tmp_path: Path, record: list[object]
) -> None:
    (tmp_path / "schedule" / "0").mkdir(parents=True)
    log = ScheduleWriter(tmp_path / "schedule" / "0" / "replica-0.0")
    shard = ScheduleWriter(tmp_path / "schedule" / "0" / "shard-0.0")
    with closing(Updates(tmp_path)) as updates:
        assert not updates.moved()
        shard.add(record)
        assert not updates.moved(), "a shard's weights may be sent without an update"
        for size in (FIRST_BYTES, 2 * PIECE):
            for _ in range(size // 300):
                log.add(record)
                assert updates.moved()
                assert not updates.moved()
        assert log.long == (len(str(record)) > 300)
        log.close()


def test_without_a_schedule_the_record_tells(tmp_path: Path) -> None:
    write(tmp_path / "run.sqlite", [work(1.0, 0, 50)])

    def moved() -> bool:
        return sum(updates.moved() for _ in range(LOOK_EVERY)) > 0

    with closing(Updates(tmp_path)) as updates:
        assert [moved(), moved()] == [True, False]
        write(tmp_path / "run.sqlite", [work(2.0, 0, 50)])
        assert [moved(), moved()] == [True, False]


# ---------------------------------------------------------------- the verdict

HIT = [Injury(1.0, "shard 0 (pid 7) is killed", without_s=0.25), Injury(2.0, "all stand still", without_s=1.5)]


def outcome(home: Path, *leases: object, status: int = 0, left: tuple[str, ...] = (), **values: object) -> Outcome:
    known = state(**{"epochs": 1, "examples_per_epoch": 100, "status": "finished", "ended": "data", **values})
    write(home / "run.sqlite", [*known, work(1.0, 0, 100), *leases])  # type: ignore[list-item]
    return Outcome(home, status, HIT, left)


def test_a_run_that_has_trained_everything_once_is_as_promised(tmp_path: Path) -> None:
    found = outcome(tmp_path, lease(0, 0, 60, 40), lease(0, 40, 60), lease(0, 60, 100))
    assert not found.broken
    assert str(found).splitlines()[-3:] == [
        "2 faults, 0 replaced, 20 examples dealt again, 0 trained more than once",
        "without an update: 875 ms (median), 1.5 s (worst)",
        "The promises held.",
    ]


def test_what_is_repeated_is_named_and_what_is_missing_is_broken(tmp_path: Path) -> None:
    found = outcome(tmp_path, lease(0, 0, 60), lease(0, 50, 90))
    assert (found.repeated, found.missed) == (10, 10)
    assert "Trained more than once: 10" in str(found)
    assert found.broken == ["examples are missing: 10"]


def test_what_is_left_behind_or_has_not_ended_is_broken(tmp_path: Path) -> None:
    whole = lease(0, 0, 100)
    assert outcome(tmp_path, whole, left=("shard 0 (pid 9)",)).broken == ["left behind: shard 0 (pid 9)"]
    found = outcome(tmp_path, status=1, ended="")
    assert found.broken == ["the command ended with 1"]
    assert Outcome(tmp_path, 0, [], ()).broken == ["no fault came about: there was nobody whom one could hit"]
    assert Outcome(tmp_path / "none", 1, HIT, ()).broken == ["the run has not finished: it is not begun"]
