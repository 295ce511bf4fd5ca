"""`squall resume`: what is said before anything starts, and which limit it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from squall.cli import main

FILE = """
import squall
from tests.tasks import regression
strategy = squall.Downpour()
task = regression()
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_report: None) -> str:
    """Its two epochs are over."""
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(FILE)
    assert main(["train", "job.py", "--launcher", "inline", "--epochs", "2", "--run-dir", "r", "--quiet"]) == 0
    return "r"


def test_a_limit_of_before_that_ends_the_run_is_named_with_the_command_that_goes_on(run: str, capsys: Any) -> None:
    assert main(["resume", run, "--steps", "20"]) == 0
    command = "resume r --epochs 4 --steps 20"
    captured = capsys.readouterr()
    assert f"the run has ended at --epochs 2, which it had before: go on with squall {command}\n" in captured.err
    assert main(command.split()) == 0
    captured = capsys.readouterr()
    assert "its limit of 20 steps is reached" in captured.out
    assert "which it had before" not in captured.err


def test_a_run_goes_on_with_event_files_for_tensorboard(run: str) -> None:
    assert main(["resume", run, "--epochs", "3", "--tensorboard"]) == 0
    assert len(list(Path(run, "tensorboard").iterdir())) == 2
    assert main(["resume", run, "--epochs", "4"]) == 0
    assert len(list(Path(run, "tensorboard").iterdir())) == 2, "it has them made anew from now on"


def test_a_run_goes_on_with_other_machines_where_it_is_said_how_they_reach_it(run: str, capsys: Any) -> None:
    assert main(["resume", run, "--machines", "2"]) == 1
    assert "machines or listen is given, and an inline run is in one process: leave one out" in capsys.readouterr().err
    assert main(["train", "job.py", "--steps", "2", "--run-dir", "several", "--quiet"]) == 0
    assert main(["resume", "several", "--machines", "2"]) == 1
    assert "machines is 2: say where others reach this one: listen='10.0.0.1:7700'" in capsys.readouterr().err


def test_a_run_goes_on_with_other_parts_where_its_model_can_be_split(run: str, capsys: Any) -> None:
    assert main(["resume", run, "--parts", "0"]) == 1
    assert "parts is 0: it must be at least 1" in capsys.readouterr().err
    assert main(["resume", run, "--parts", "2"]) == 1
    assert "parts is 2, and an inline run is in one process" in capsys.readouterr().err
    assert main(["train", "job.py", "--steps", "2", "--run-dir", "whole", "--quiet"]) == 0
    assert main(["resume", "whole", "--parts", "2", "--steps", "4"]) == 1
    assert "give Task(split=...)" in capsys.readouterr().err
    Path("job.py").write_text(FILE.replace("Downpour()", "SingleProcess()"))
    assert main(["train", "job.py", "--steps", "2", "--run-dir", "single", "--quiet"]) == 0
    assert main(["resume", "single", "--parts", "2", "--steps", "4"]) == 1
    assert "parts is 2, and SingleProcess is one process" in capsys.readouterr().err


def test_a_record_that_is_none_is_named_before_anything_starts(
    run: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(run, "run.sqlite").write_bytes(b"garbage" * 1000)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("squall.cli.resume._changed", None)  # what comes next is not come to
        assert main(["resume", run, "--epochs", "3"]) == 1
    error = capsys.readouterr().err
    assert "cannot read r/run.sqlite: file is not a database; it is no record of a run: move it away" in error
    Path(run, "run.sqlite").unlink()
    assert main(["resume", run, "--epochs", "3"]) == 0, "as the message says"
