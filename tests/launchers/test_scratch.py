"""Directories under the system's temporary one: what a killed run leaves the next removes, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from squall.launchers import scratch


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_what_nobody_holds_any_more_is_removed_by_the_next() -> None:
    left, held = scratch.new_name(), scratch.new_name()
    os.close(scratch.make(left))  # as the kernel does for who is killed
    handle = scratch.make(held)
    assert not left.exists()
    assert held.exists()
    other = scratch.share(held)
    os.close(handle)
    with scratch.directory() as own:
        assert held.exists(), "somebody holds it yet"
        assert own.stat().st_mode & 0o777 == 0o700
    assert not own.exists()
    os.close(other)


def test_nothing_that_lies_there_keeps_a_run_waiting(tmp_path: Path) -> None:
    name = tmp_path / f"squall-{'b' * 16}"
    name.mkdir()
    os.mkfifo(name / "in-use.lock")
    with scratch.directory() as own:
        assert own.exists()


def test_directories_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in ("squall-of-a-user", f"squall-{'a' * 16}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()  # as a run's directory has
    with scratch.directory():
        pass
    assert len(list(tmp_path.iterdir())) == 2
