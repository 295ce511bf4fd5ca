import math
from contextlib import closing
from pathlib import Path

from squall.record.rows import EventRow, MetricRow, StalenessRow
from squall.record.writer import Record
from squall.report import Reader
from tests.report.conftest import work, write


def test_since_gives_every_row_once(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    with closing(Record(path)) as record, closing(Reader(path)) as reader:
        assert reader.since(EventRow) == ([], 0)
        seen, rowid = [], 0
        for number in range(5):
            record.add(EventRow(float(number), "warning", str(number)))
            record.commit(now=float(number))
            if number % 2 == 0:
                rows, rowid = reader.since(EventRow, rowid)
                seen += [row.text for row in rows]
        assert seen == ["0", "1", "2", "3", "4"]
        assert reader.since(EventRow, rowid) == ([], rowid)


def test_a_file_without_tables_yet_reads_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    path.touch()
    with closing(Reader(path)) as reader:
        assert (reader.state(), reader.metrics(), reader.progress(), reader.staleness()) == ({}, {}, [], [])


def test_a_path_with_odd_characters_is_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "50% done? #1.sqlite", [EventRow(0.0, "started", "")])
    with closing(Reader(path)) as reader:
        assert len(reader.rows(EventRow)) == 1


def test_work_is_added_up_per_replica_and_bin(tmp_path: Path) -> None:
    rows = [work(0.5, 0, 100, 4.0), work(0.9, 0, 300, 2.0), work(0.9, 1, 100, 1.0), work(2.5, 0, 100, 1.0)]
    with closing(Reader(write(tmp_path / "run.sqlite", list(rows)))) as reader:
        binned = reader.progress(bin_s=1.0)
        assert [(row.time_s, row.replica, row.examples, row.loss) for row in binned] == [
            (0.9, 0, 400, 2.5),
            (0.9, 1, 100, 1.0),
            (2.5, 0, 100, 1.0),
        ]
        whole = reader.progress()
        assert [(row.replica, row.examples, row.batches, row.loss) for row in whole] == [
            (1, 100, 2, 1.0),
            (0, 500, 10, 2.2),
        ]
        assert whole[1].compute_s == 2.25


def test_a_loss_that_was_no_number_does_not_hide_the_others(tmp_path: Path) -> None:
    rows = [work(1.0, 0, 100, math.nan), work(2.0, 0, 300, 2.0), work(2.0, 1, 300, math.nan)]
    with closing(Reader(write(tmp_path / "run.sqlite", list(rows)))) as reader:
        first, second = reader.progress()
    assert (first.examples, first.loss) == (400, 2.0)
    assert math.isnan(second.loss)


def test_last_metrics_and_staleness(tmp_path: Path) -> None:
    metrics = [MetricRow(float(t), t, t, t, name, t / 4) for t in (1, 2) for name in ("loss", "accuracy")]
    pushes = [
        StalenessRow(1.0, 1, 2, 5),
        StalenessRow(1.0, 0, 0, 1),
        StalenessRow(2.0, 1, 2, 6),
        StalenessRow(2.0, 1, 0, 1),
    ]
    with closing(Reader(write(tmp_path / "run.sqlite", [*metrics, *pushes]))) as reader:
        assert {name: metric.value for name, metric in reader.metrics().items()} == {"loss": 0.5, "accuracy": 0.5}
        assert [(row.replica, row.staleness, row.count) for row in reader.staleness()] == [
            (0, 0, 1),
            (1, 0, 1),
            (1, 2, 11),
        ]
