"""Viewers are shown each row once, a few times a second, and none is disturbed by another."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from squall.record.rows import EventRow, Row, StateRow
from squall.record.writer import Record
from squall.report import Viewers
from tests.report.conftest import lease, state, work, write


class Eye:
    """Keeps what it is shown; raises `error` when it has seen a warning."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.seen: list[Row] = []
        self.error = error
        self.closed = 0

    def show(self, rows: Sequence[Row], now: float) -> None:
        self.seen += rows
        if self.error is not None and any(isinstance(row, EventRow) for row in rows):
            raise self.error

    def close(self) -> None:
        self.closed += 1


def test_every_viewer_is_shown_each_row_once_and_the_last_ones_at_the_end(tmp_path: Path) -> None:
    path, eyes = tmp_path / "run.sqlite", [Eye(), Eye()]
    with closing(Viewers(path, eyes)) as viewers:
        viewers.look(now=0.0)  # there is no record yet
        first = [*state(status="running", shards=1), work(1.0, 0, 10)]
        write(path, [*first, lease(0, 0, 10)])
        viewers.look(now=0.1)
        assert eyes[0].seen == first
        write(path, [work(2.0, 0, 20)])
        viewers.look(now=0.3)
        assert len(eyes[0].seen) == 3, "no more than four times a second"
        viewers.look(now=0.4)
        assert eyes[0].seen[3:] == [work(2.0, 0, 20)]
        write(path, [EventRow(2.0, "finished", ""), *state(status="finished")])
    assert eyes[0].seen[4:] == [StateRow("status", "finished"), EventRow(2.0, "finished", "")]
    assert eyes[0].seen == eyes[1].seen
    assert [eye.closed for eye in eyes] == [1, 1]


@pytest.mark.parametrize("error", [OSError("the terminal is gone"), SystemExit(1)])
def test_a_viewer_that_fails_is_closed_and_the_others_go_on(tmp_path: Path, error: BaseException) -> None:
    path, failing, other = write(tmp_path / "run.sqlite", [work(1.0, 0, 10)]), Eye(error), Eye()
    with closing(Viewers(path, [failing, other])) as viewers, closing(Record(path)) as record:
        for now in range(3):
            record.add(EventRow(float(now), "warning", ""))
            record.commit(now=now, force=True)
            viewers.look(float(now))
    assert [len(eye.seen) for eye in (failing, other)] == [2, 4]
    assert [eye.closed for eye in (failing, other)] == [1, 1]


def test_a_record_that_cannot_be_read_ends_the_view_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").write_bytes(b"no database" * 100)
    eye = Eye()
    with closing(Viewers(tmp_path / "run.sqlite", [eye])) as viewers:
        viewers.look(0.0)
        viewers.look(1.0)
    assert (eye.seen, eye.closed) == ([], 1)


def test_after_a_run_has_gone_back_to_a_snapshot_the_rows_of_its_second_try_are_shown(tmp_path: Path) -> None:
    path, eye = write(tmp_path / "run.sqlite", [work(float(now), 0, 10) for now in range(20)]), Eye()
    with closing(Viewers(path, [eye])) as viewers:
        viewers.look(0.0)
        with closing(Record(path)) as record:
            record.rewind(9.5, 0, 0, [])
            viewers.look(1.0)
            assert len(eye.seen) == 20
            again = [work(float(now), 0, 11) for now in range(10, 15)]
            for row in again:
                record.add(row)
        viewers.look(2.0)
        assert eye.seen[20:] == again
