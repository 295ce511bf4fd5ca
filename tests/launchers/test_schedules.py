"""Schedules that machines hand over: each file is that of the machine that has begun it."""

from __future__ import annotations

from pathlib import Path

import pytest

from squall.launchers.schedules import BLOCK_BYTES, Schedules


def test_pieces_of_a_file_are_put_together(tmp_path: Path) -> None:
    schedules = Schedules(tmp_path)
    for data in ("QQ==", "Qg=="):
        schedules.take(1, {"kind": "scheduled", "file": "replica-1.0", "data": data})
    assert (tmp_path / "replica-1.0").read_bytes() == b"AB"


def test_a_machine_leaves_no_more_than_it_may(tmp_path: Path) -> None:
    schedules = Schedules(tmp_path, at_most=2 * BLOCK_BYTES + 1)
    said = {"kind": "scheduled", "data": "QQ=="}
    schedules.take(1, {**said, "file": "replica-1.0"})
    with pytest.raises(OSError, match="more than --keep-schedule allows for"):
        schedules.take(1, {**said, "file": "replica-1.1"})
    schedules.take(2, {**said, "file": "replica-2.0"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["replica-1.0", "replica-2.0"]


def test_what_is_another_machines_is_left_as_it_is(tmp_path: Path) -> None:
    schedules = Schedules(tmp_path)
    (tmp_path / "replica-0.0").write_bytes(b"the head's own")
    schedules.take(1, {"kind": "scheduled", "file": "replica-1.0", "data": "QQ=="})
    for machine, file in ((1, "replica-0.0"), (2, "replica-1.0")):
        with pytest.raises(FileExistsError):
            schedules.take(machine, {"kind": "scheduled", "file": file, "data": "Qg=="})
    assert (tmp_path / "replica-0.0").read_bytes() == b"the head's own"
    assert (tmp_path / "replica-1.0").read_bytes() == b"A"
