"""What the page is told: all that it can show at first, and then what is new."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from squall.live.epochs import under_way
from squall.live.feed import BINS, COLUMNS, RECENT_S, Feed, activity
from squall.record.rows import ActivityRow, EventRow, LeaseRow, MetricRow, ProgressRow, SkipRow, StalenessRow, StateRow
from squall.record.writer import Record
from squall.report.reader import Reader


def told(message: bytes | None) -> dict[str, Any]:
    assert message is not None
    return json.loads(message)  # type: ignore[no-any-return]


def write(path: Path, seconds: int, replicas: int = 2) -> None:
    """A second a report: half of the time computing, a quarter waiting for shard 0 in even ones and 1 in odd ones."""
    with closing(Record(path)) as record:
        record.add(StateRow("status", "running"))
        for second in range(1, seconds + 1):
            for replica in range(replicas):
                node, awaited = f"replica-{replica}.0", f"shard {second % 2}"
                record.add(ProgressRow(second, replica, 10, 1, 0.5, 0.5, 0.25, 4, 4, second))
                record.add(StalenessRow(second, replica, second % 3, 1))
                record.add(ActivityRow(second, 0, node, 1.0, 0.5, 0, 0, 0.25, awaited, 0.25, 100))
        record.add(LeaseRow(0, 0, 0, 64, 0, 0, 0.0, 1.0, 48))


def test_a_short_run_is_told_as_it_is_and_then_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    write(path, 3)
    with closing(Feed(path, "mine")) as feed:
        first = told(feed.begin())
        assert (first["name"], first["columns"], first["leases"]) == ("mine", COLUMNS, [64, 48, 16])
        assert first["rows"]["state"] == [["status", "running"]]
        assert [len(first["rows"][table]) for table in ("progress", "staleness", "activity")] == [6, 6, 6]
        assert dict(zip(COLUMNS["progress"], first["rows"]["progress"][-1]))["clock"] == 3
        assert feed.more() is None
        with closing(Record(path)) as record:
            record.add(MetricRow(3.5, 0, 60, 6, "loss", float("nan")))
            record.add(EventRow(3.5, "lost", "replica 1"))
        assert told(feed.more())["rows"] == {
            "metric": [[3.5, 0, 60, 6, "loss", None]],
            "event": [[3.5, "lost", "replica 1"]],
        }


def test_a_run_that_goes_on_from_a_snapshot_is_told_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    write(path, 5)
    with closing(Feed(path, "mine")) as feed:
        assert len(told(feed.begin())["rows"]["progress"]) == 10
        with closing(Record(path)) as record:
            record.rewind(3.0, 0, 0, [])
            for second in range(4, 9):
                record.add(ProgressRow(second, 0, 10, 1, 0.5, 0.5, 0.25, 4, 4, second))
            record.add(StateRow("began_at", "1e9"))
        again = told(feed.more())
        assert again["columns"] == COLUMNS
        assert [row[0] for row in again["rows"]["progress"]] == [1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8]
        assert feed.more() is None


def test_a_long_run_is_told_in_bins_and_its_last_minute_as_it_is(tmp_path: Path) -> None:
    path, seconds = tmp_path / "run.sqlite", 20 * BINS
    write(path, seconds, replicas=1)
    with closing(Feed(path, "mine")) as feed:
        rows = told(feed.begin())["rows"]
    work = [dict(zip(COLUMNS["progress"], row)) for row in rows["progress"]]
    assert len(work) <= BINS + 1
    assert sum(row["examples"] for row in work) == 10 * seconds
    assert work[-1]["clock"] == seconds
    assert sum(row[3] for row in rows["staleness"]) == seconds
    assert len(rows["activity"]) == RECENT_S


def test_the_whole_run_is_told_in_bins_with_whom_each_waited_for_most(tmp_path: Path) -> None:
    path, seconds = tmp_path / "run.sqlite", 4 * BINS
    write(path, seconds)
    rows = [dict(zip(COLUMNS["activity"], row)) for row in told(activity(path))["rows"]["activity"]]
    assert len(rows) <= 2 * (BINS + 1)
    for node in ("replica-0.0", "replica-1.0"):
        mine = [row for row in rows if row["node"] == node]
        assert sum(row["compute_s"] for row in mine) == pytest.approx(seconds / 2)
        assert sum(row["seconds"] for row in mine) == pytest.approx(seconds)
        assert {row["awaited"] for row in mine} <= {"shard 0", "shard 1"}


def test_epochs_are_told_from_the_first_that_is_not_whole(tmp_path: Path) -> None:
    """Positions run on from an epoch into the next in leases that were put together."""
    path = tmp_path / "run.sqlite"

    def told_with(*rows: LeaseRow | SkipRow | StateRow) -> list[Any]:
        with closing(Record(path)) as record:
            for row in rows:
                record.add(row)
        with closing(Reader(path)) as reader:
            return under_way(reader)

    assert told_with() == []
    assert told_with(StateRow("examples_per_epoch", "100")) == []
    assert told_with(LeaseRow(1, 0, 10, 20, 0, 0, 0.0, 1.0, 10)) == [(0, 20, [])]  # given back as a whole
    assert told_with(LeaseRow(0, 0, 0, 10, 0, 0, 0.0, 1.0, 10)) == [(0, 20, [(0, 10)])]
    assert told_with(LeaseRow(2, 0, 20, 150, -1, 0, 0.0, 1.0, 150)) == [
        (0, 100, [(0, 10), (20, 100)]),
        (1, 50, [(0, 50)]),
    ]
    assert told_with(LeaseRow(3, 0, 10, 20, 1, 0, 0.0, 2.0, 20)) == [(1, 50, [(0, 50)])]
    assert told_with(LeaseRow(4, 1, 60, 90, 1, 0, 0.0, 2.0, 80)) == [(1, 90, [(0, 50), (60, 80)])]
    assert told_with(SkipRow(4, 1, 60, 70, 1)) == [(1, 90, [(0, 50), (60, 80)])]  # nobody has to train them any more
    assert [epoch for epoch, *_ in told_with(LeaseRow(5, 9, 0, 10, 1, 0, 0.0, 2.0, 10))] == [1, 2, 9], "the first two"
    assert told_with(LeaseRow(6, 1, 80, 900, -1, 0, 0.0, 2.0, 900))[0] == (1, 100, [(0, 50), (60, 100)])
    assert [epoch for epoch, *_ in told_with(LeaseRow(7, 1, 50, 60, 1, 0, 0.0, 3.0, 60))] == [9]


def test_a_run_without_any_work_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    Record(path).close()
    with closing(Feed(path, "mine")) as feed:
        assert told(feed.begin())["rows"] == {}
    assert told(activity(path))["rows"] == {}
