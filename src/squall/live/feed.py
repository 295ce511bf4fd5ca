"""What the page is told of a run: rows of its record as they are, by table.

The page adds up. What it is told first is as much as it can show, however long the run is: work added up within bins,
the pushes by staleness, and what processes did lately.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import msgspec

from squall.live.epochs import under_way
from squall.record.rows import ActivityRow, ProgressRow, Row, StalenessRow, StateRow, table_name
from squall.report.news import News
from squall.report.reader import Reader

RECENT_S = 60.0  # for which each process is shown at first
BINS = 400  # of a curve, and of a row of processes over a whole run
BIN_S = 1.0  # at the least, of such a row: processes report four times in it
LEASES_EVERY = 2  # looks

COLUMNS: dict[str, list[str]] = {table_name(table): [field.name for field in fields(table)] for table in get_args(Row)}
_VALUES = {name: attrgetter(*columns) for name, columns in COLUMNS.items()}


class Feed:
    """For one page. Raises `RecordError` where the record cannot be read."""

    def __init__(self, record: Path, name: str) -> None:
        self._name = name
        self._reader = Reader(record)
        self._news = News()
        self._looks = 0
        self._leases: dict[str, Any] = {}

    def close(self) -> None:
        self._reader.close()

    def begin(self) -> bytes:
        """The first message: JSON, with the columns of tables, and rows in their order."""
        self._news = News()
        with self._reader.at_one_moment():
            rows = self._all()
        return _message(rows, name=self._name, columns=COLUMNS, **self._told_of_leases())

    def _all(self) -> list[Row]:
        end_s = self._reader.end_s()
        rows: list[Row] = []
        if end_s > RECENT_S:
            for table in (ProgressRow, StalenessRow, ActivityRow):
                self._news.skip(self._reader, table)
            rows += self._reader.progress(end_s / BINS)
            rows += self._reader.staleness()
            rows += self._reader.activity(end_s - RECENT_S, end_s)
        return rows + self._news.take(self._reader)

    def more(self) -> bytes | None:
        """What is new; None: nothing."""
        rows = self._news.take(self._reader)
        if any(isinstance(row, StateRow) and row.key == "began_at" for row in rows):
            return self.begin()  # it may have gone back to a snapshot: what it forgot is to go from the page as well
        self._looks += 1
        before = self._leases
        leases = self._told_of_leases() if self._looks % LEASES_EVERY == 0 else before
        return _message(rows, **leases) if rows or leases != before else None

    def _told_of_leases(self) -> dict[str, Any]:
        self._leases = {"leases": self._reader.lease_sums(), "epochs": under_way(self._reader)}
        return self._leases


def activity(record: Path) -> bytes:
    """What processes did over the whole run, in at most `BINS` bins, as the page has it; in a short one as it is."""
    with closing(Reader(record)) as reader:
        stop_s = reader.end_s()
        return _message(reader.activity(0.0, stop_s, max(BIN_S, stop_s / BINS) if stop_s > RECENT_S else 0.0))


def _message(rows: Iterable[Row], **more: Any) -> bytes:
    told: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        name = table_name(type(row))
        told.setdefault(name, []).append(_VALUES[name](row))
    return msgspec.json.encode({"rows": told, **more})
