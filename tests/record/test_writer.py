import math
import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

import squall.record.rows
from squall.record.rows import (
    ActivityRow,
    EventRow,
    ExtraRow,
    LeaseRow,
    LossRow,
    MemberRow,
    MetricRow,
    PartRow,
    ProgressRow,
    RecordError,
    Row,
    SkipRow,
    StalenessRow,
    StateRow,
)
from squall.record.writer import BUSY_S, PAUSE_AT_MOST_S, Record
from squall.report import Reader

ONE_OF_EACH = [
    MetricRow(1.5, 0, 640, 10, "accuracy", 0.5),
    ProgressRow(0.5, 1, 64, 1, 2.25, 0.375, 0.125, 4096, 8192),
    PartRow(0.5, 1, 0, 0.25, 0.125, 0.5, 1 << 33),
    ActivityRow(0.5, 2, "replica-1.0", 0.25, 0.125, 0.0, 0.0625, 0.03125, "shard 1", 0.015625, 1 << 33, 0.0078125),
    ExtraRow(0.5, 1, 64, "divergence", 0.75),
    StalenessRow(0.5, 1, 3, 7),
    LeaseRow(4, 0, 640, 1280, 1, 2, 0.25, 0.5, 704),
    SkipRow(4, 0, 656, 672, 1),
    LossRow(0.5, 1, 0, 640, 656),
    MemberRow("replica-1", 4711, 0.25, "lost", "killed by SIGKILL"),
    EventRow(0.25, "lost", 'replica 1 lost: it\'s "gone"'),
    StateRow("strategy", "downpour"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.sqlite"


def read(path: Path, table: type[Row]) -> list[Row]:
    with closing(Reader(path)) as reader:
        return reader.rows(table)


def test_every_table_gives_back_what_was_written(path: Path) -> None:
    with closing(Record(path)) as record:
        for row in ONE_OF_EACH:
            record.add(row)
    assert {type(row) for row in ONE_OF_EACH} == set(get_args(Row))
    for row in ONE_OF_EACH:
        assert read(path, type(row)) == [row]


def test_only_the_owner_may_read_the_files(path: Path) -> None:
    with closing(Record(path)) as record:
        record.add(ONE_OF_EACH[0])
        record.commit(now=0.0)
        files = sorted(path.parent.iterdir())
        assert [file.name for file in files] == ["run.sqlite", "run.sqlite-shm", "run.sqlite-wal"]
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_rows_are_seen_by_other_readers_once_committed_and_not_before(path: Path) -> None:
    with closing(Record(path)) as record, closing(Reader(path)) as reader:
        record.add(EventRow(0.0, "started", ""))
        assert reader.rows(EventRow) == []
        assert record.commit(now=10.0)
        assert reader.rows(EventRow) == [EventRow(0.0, "started", "")]


def test_commits_are_at_least_a_fifth_of_a_second_apart_unless_forced(path: Path) -> None:
    with closing(Record(path)) as record:
        wrote = []
        for now, force in [(5.0, False), (5.1, False), (5.1, True), (5.25, False), (5.31, False)]:
            record.add(EventRow(now, "warning", ""))
            wrote.append(record.commit(now, force))
        assert wrote == [True, False, True, False, True]
        assert not record.commit(now=99.0), "nothing was buffered"


def test_a_resumed_run_appends_and_replaces_state(path: Path) -> None:
    for value in ("running", "finished"):
        with closing(Record(path)) as record:
            record.add(EventRow(0.0, "started", value))
            record.add(StateRow("status", value))
    assert read(path, EventRow) == [EventRow(0.0, "started", "running"), EventRow(0.0, "started", "finished")]
    with closing(Reader(path)) as reader:
        assert reader.state() == {"status": "finished"}


def test_numbers_that_are_not_finite_survive(path: Path) -> None:
    with closing(Record(path)) as record:
        for value in (math.nan, math.inf, -math.inf):
            record.add(MetricRow(0.0, 0, 0, 0, "loss", value))
    nan, *rest = read(path, MetricRow)
    assert isinstance(nan, MetricRow)
    assert math.isnan(nan.value)
    assert rest == [MetricRow(0.0, 0, 0, 0, "loss", math.inf), MetricRow(0.0, 0, 0, 0, "loss", -math.inf)]


def test_scalars_of_numpy_and_torch_are_stored_as_numbers(path: Path) -> None:
    with closing(Record(path)) as record:
        record.add(MetricRow(0.5, np.int64(3), torch.tensor(640), 1, "loss", torch.tensor(0.25)))  # type: ignore[arg-type]
    assert read(path, MetricRow) == [MetricRow(0.5, 3, 640, 1, "loss", 0.25)]


def test_a_killed_writer_loses_nothing_that_was_committed(path: Path) -> None:
    program = """
import os, signal, sys
from squall.record.rows import EventRow
from squall.record.writer import Record
record = Record(sys.argv[1])
record.add(EventRow(0.0, "started", "kept"))
record.commit(now=0.0)
record.add(EventRow(0.1, "warning", "never committed"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    source = Path(squall.record.rows.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program, path], env={"PYTHONPATH": str(source)}, timeout=60)
    assert done.returncode == -9
    with closing(Record(path)) as record:
        record.add(EventRow(0.2, "started", "resumed"))
    assert [event.text for event in read(path, EventRow) if isinstance(event, EventRow)] == ["kept", "resumed"]


def test_a_locked_record_is_told_and_its_rows_are_written_later(path: Path) -> None:
    with closing(Record(path, busy_s=0.0)) as record, closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        record.add(EventRow(0.0, "started", ""))
        with pytest.raises(RecordError, match=r"run\.sqlite: database is locked; another process"):
            record.commit(now=0.0)
        other.rollback()
        assert not record.commit(now=0.1, force=True), "it waits a little before it tries again"
        assert record.commit(now=0.2)
    assert read(path, EventRow) == [EventRow(0.0, "started", "")]


def test_a_lock_costs_a_few_tries_and_little_time_however_many_rows_wait(path: Path) -> None:
    """A minute in which a coordinator looks a hundred times a second: under one percent of it may go into tries."""
    with closing(Record(path)) as record, closing(sqlite3.connect(path)) as other:
        for number in range(50_000):
            record.add(ProgressRow(0.0, number % 2, 64, 1, 1.0, 0.0, 0.0, 0, 0))
        other.execute("BEGIN IMMEDIATE")
        tries, began = 0, time.process_time()
        for look in range(6000):
            record.add(LeaseRow(look, 0, look, look + 1, 0, 0, 0.0, 0.0, look))
            try:
                assert not record.commit(now=look / 100, force=look % 7 == 0)
            except RecordError:
                tries += 1
        assert tries * BUSY_S < 0.6
        assert time.process_time() - began < 0.6
        other.rollback()
        assert record.commit(now=60 + PAUSE_AT_MOST_S)
    assert sum(row.examples for row in read(path, ProgressRow) if isinstance(row, ProgressRow)) == 64 * 50_000
    assert len(read(path, LeaseRow)) == 6000


def test_a_full_disk_is_told_and_tears_nothing(path: Path) -> None:
    with closing(Record(path)) as record:
        record.add(EventRow(0.0, "started", ""))
        record.commit(now=0.0)
        # SQLite gives the same error as for a disk that is full.
        record._db.execute("PRAGMA max_page_count = 1")
        for _ in range(1000):
            record.add(EventRow(1.0, "warning", "x" * 100))
        with pytest.raises(RecordError, match="full; free some space"):
            record.commit(now=1.0)
        assert read(path, EventRow) == [EventRow(0.0, "started", "")]
        record._db.execute("PRAGMA max_page_count = 100000")
    assert len(read(path, EventRow)) == 1001


@pytest.mark.parametrize("later", [False, True], ids=["never written", "written later"])
def test_what_waited_when_a_snapshot_was_made_is_taken_in_once(path: Path, later: bool) -> None:
    gone = LeaseRow(9, 0, 0, 640, 1, 0, 0.0, 0.0, 640)
    with closing(Record(path)) as record:
        record.add(gone)
        record.add(StateRow("snapshot", "6"))
    record = Record(path)
    for row in [*ONE_OF_EACH, MetricRow(np.float64(2.0), 0, 640, 10, "loss", math.nan), StateRow("snapshot", "7")]:
        record.add(row)
    record.remove(gone)
    waiting = record.waiting()
    if later:
        record.secure()
    record._db.close()  # as a kill does
    for _ in range(2):
        again = Record(path)
        again.take_in(7, waiting)
        again._db.close()
    for row in ONE_OF_EACH:
        assert read(path, type(row))[0] == row
    assert len(read(path, ProgressRow)) == len(read(path, LeaseRow)) == 1
    _, unknown = read(path, MetricRow)
    assert isinstance(unknown, MetricRow)
    assert math.isnan(unknown.value)


def test_a_record_that_cannot_be_made_or_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file or directory"):
        Record(tmp_path / "missing" / "run.sqlite")
    (tmp_path / "letter").write_text("Dear reader, " * 100)
    with pytest.raises(RecordError, match="it is no record of a run"):
        Record(tmp_path / "letter")
    with pytest.raises(RecordError, match="give the folder of a run"):
        Reader(tmp_path / "missing")
    with closing(Reader(tmp_path / "letter")) as reader, pytest.raises(RecordError, match="no record of a run"):
        reader.state()


def test_a_rewound_record_forgets_what_comes_after_the_snapshot(path: Path) -> None:
    with closing(Record(path)) as record:
        for time_s in (1.0, 2.0, 3.0):
            record.add(MetricRow(time_s, 0, 640, 10, "loss", 0.5))
            record.add(LeaseRow(int(time_s), 0, 0, 10, 0, 0, 0.0, time_s, 10))
            record.add(SkipRow(int(time_s) + 1, 0, 0, 5, 0))
        record.commit(now=0.0, force=True)
        record.rewind(2.0, first_lease=3, next_lease=4, leases=[1])
    assert [row.time_s for row in read(path, MetricRow)] == [1.0, 2.0]
    assert [row.lease for row in read(path, LeaseRow)] == [2]
    assert [row.lease for row in read(path, SkipRow)] == [2, 3], "a lease that the snapshot knows is told anew"


def test_a_record_that_was_begun_with_fewer_columns_is_read_and_gone_on_with(path: Path) -> None:
    old, new = (
        ProgressRow(0.5, 1, 64, 1, 2.25, 0.375, 0.125, 4096, 8192),
        ProgressRow(1.0, 1, 64, 1, 2.0, 0, 0, 0, 0, 7),
    )
    with closing(Record(path)) as record:
        record.add(old)
    with closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE progress DROP COLUMN clock")
    assert read(path, ProgressRow) == [old]
    with closing(Record(path)) as record:
        record.add(new)
    assert read(path, ProgressRow) == [old, new]
