"""A script whose replicas have parts is replayed by as many processes, bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from squall.record.rows import MemberRow, ProgressRow
from tests import deep
from tests.launchers.processes import Started
from tests.launchers.test_script_parts import started
from tests.replaying.test_replay_scripts import replayed

CASES = [
    ("pipeline", "averaging --every 2", 2),
    ("examples", "downpour --push-every 2 --fetch-every 2", 2),
    ("two optimizers", "downpour", 2),
    ("examples", "diloco --inner-steps 4", 3),
    ("whole", "bounded_delay --overlap", 2),
    ("pipeline", "asynchronous_sgd", 2),
]


def trained(tmp_path: Path, *arguments: str, strategy: str, parts: int = 2) -> Path:
    flags = ("--replicas", "2", "--shards", "2", "--strategy", *strategy.split())
    run = started(tmp_path, *arguments, flags=flags, parts=parts)
    status, _, err = run.finish()
    assert status == 0, err
    return run.directory


@pytest.mark.parametrize(("how", "strategy", "parts"), deep.sweep(CASES, 1))
def test_every_part_has_its_loop_again(tmp_path: Path, how: str, strategy: str, parts: int) -> None:
    directory = trained(tmp_path, "--how", how, strategy=strategy, parts=parts)
    status, out, err = replayed(directory, "--check")
    assert status == 0, out + err
    assert "the same, bit for bit" in out


@deep.only
def test_across_the_death_of_a_part_an_interrupt_and_a_resume_with_another_number(tmp_path: Path) -> None:
    run = started(tmp_path, "--how", "examples", "--epochs", "50", flags=("--replicas", "2", "--strategy", "downpour"))
    try:
        for replica in range(2):
            run.wait_rows(ProgressRow, lambda row, replica=replica: row.replica == replica)
        os.kill(run.processes()["replica 1 part 1"], signal.SIGKILL)
        run.wait_rows(MemberRow, lambda row: (row.node, row.change) == ("replica-1.1", "joined"))
    finally:
        run.process.send_signal(signal.SIGINT)
        status, _, err = run.finish()
    assert status == 130, err
    status, _, err = Started(run.directory, "resume", str(run.directory), "--parts", "3", "--replicas", "1").finish()
    assert status == 0, err
    status, out, err = replayed(run.directory, "--check")
    assert status == 0, out + err
    assert "the same, bit for bit" in out


def test_what_a_part_raises_in_the_replay_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = trained(tmp_path, "--how", "pipeline", strategy="synchronous")
    monkeypatch.setenv("RAISES", "1")
    status, out, err = replayed(directory)
    assert status == 1, out + err
    assert "does not do what it did" in out + err
    assert "KeyError: 'in part 1, this time'" in out + err
