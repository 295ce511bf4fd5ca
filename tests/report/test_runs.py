"""The list of runs, while others come and go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from squall.report import runs
from squall.runtime.lock import LOCK


def test_a_run_that_is_removed_as_it_is_listed_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / LOCK).touch()
    found = {tmp_path / "gone": {os.getpid()}, there: {os.getpid()}}
    monkeypatch.setattr(runs, "running", lambda directory: found)
    assert [Path(row.run).name for row in runs.listed(tmp_path, over=False)] == ["there"]
