"""`squall chaos`: whole runs under faults, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from squall.cli import main
from squall.cli.chaos import duration
from squall.record.rows import EventRow
from squall.report import Reader
from tests import deep
from tests.launchers.processes import FILE

WAIT_S = 240.0


def chaos(run_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "squall", "chaos", *flags[:2], str(FILE), "--run-dir", str(run_dir), *flags[2:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)


@deep.only
@pytest.mark.parametrize("strategy", deep.sweep(["downpour", "synchronous"], 1))
def test_a_run_whose_processes_are_killed_keeps_its_promises(run_dir: Path, strategy: str) -> None:
    flags = ["--kill", "replica", "--kill", "evaluator", "--every", "1500ms", "--seconds", "6", "--strategy", strategy]
    ended = chaos(run_dir, *flags, "--replicas", "2", "--snapshot-every-s", "1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    hits = re.findall(r"^ +[\d.]+ s  (replica \d|evaluator) \(pid \d+\) is killed$", ended.stdout, re.MULTILINE)
    assert len(hits) >= 2, ended.stdout
    assert f"{len(hits)} faults, " in ended.stdout
    assert re.search(r"No example was missed in \d+ finished epochs", ended.stdout)
    assert re.search(r"without an update: \S+ \w+ \(median\), \S+ \w+ \(worst\)", ended.stdout)
    assert ended.stdout.endswith("The promises held.\n")


@deep.only
def test_nobody_to_hit_is_told(run_dir: Path) -> None:
    ended = chaos(run_dir, "--kill", "shard", "--strategy", "single_process", "--seconds", "1")
    assert ended.returncode == 1
    assert "NOT as promised: no fault came about" in ended.stdout


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "no fault is asked for: give --kill shard"),
        (("--cut", "--machines", "1"), "of a run on one machine no network can be cut, so give 2 or more"),
        (("--kill", "any", "--detach"), "--detach leaves a run alone"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(flags: tuple[str, ...], says: str, capsys: Any) -> None:
    assert main(["chaos", str(FILE), *flags]) == 1
    assert re.search(says, capsys.readouterr().err)


@deep.only
@pytest.mark.timeout(WAIT_S + 20)  # no pause counts in --seconds, and with busy cores they are long
def test_machines_that_are_cut_off_are_lost_and_join_anew(run_dir: Path) -> None:
    """Each is in a network of its own. It is cut off for longer than a machine may be silent."""
    flags = ("--cut", "--machines=3", "--every", "3s", "--lasting", "4s", "--seconds", "30", "--snapshot-every-s", "1")
    ended = chaos(run_dir, *flags, "--replicas", "3", "--shards", "2", "--epochs", "100000")
    if "no network of its own can be made here" in ended.stderr:
        pytest.skip(ended.stderr)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"machine \d is cut off, for 4 s", ended.stdout)
    with closing(Reader(run_dir / "run.sqlite")) as reader:
        told = [row.text for row in reader.rows(EventRow) if row.kind == "lost"]
    assert re.search(r"machine \d.*: nothing was heard of it for 2 s", " ".join([ended.stderr, *told]))
    assert re.search(r"squall: machine 3 has joined", ended.stderr)
    assert ended.stdout.endswith("The promises held.\n")


@deep.only
def test_a_wrong_file_is_named_by_the_command_that_trains(run_dir: Path) -> None:
    ended = chaos(run_dir, "--kill", "any", "--strategy", "none")
    assert ended.returncode == 2
    assert "none" in ended.stderr
    assert "promise" not in ended.stdout


@pytest.mark.parametrize("wrong", ["-s", "two", "0s", "1h", "s"])
def test_a_time_has_a_unit(wrong: str, capsys: Any) -> None:
    assert [duration(text) for text in ("2s", "500ms", "1m", "0.5")] == [2.0, 0.5, 60.0, 0.5]
    with pytest.raises(SystemExit):
        main(["chaos", "--every", wrong, str(FILE)])
