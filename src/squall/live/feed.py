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

from squall.record.rows import ActivityRow, ProgressRow, Row, StalenessRow, table_name
from squall.report.news import News
from squall.report.reader import Reader

RECENT_S = 60.0  # for which each process is shown at first
BINS = 400  # of a curve, and of a row of processes over a whole run
LEASES_EVERY = 8  # looks

COLUMNS: dict[str, list[str]] = {table_name(table): [field.name for field in fields(table)] for table in get_args(Row)}
_VALUES = {name: attrgetter(*columns) for name, columns in COLUMNS.items()}


class Feed:
    """For one page. Raises `RecordError` where the record cannot be read."""

    def __init__(self, record: Path, name: str) -> None:
        self._name = name
        self._reader = Reader(record)
        self._news = News()
        self._looks = 0
        self._leases: list[int] = []

    def close(self) -> None:
        self._reader.close()

    def begin(self) -> bytes:
        """The first message: JSON, with the columns of tables, and rows in their order."""
        with self._reader.at_one_moment():
            rows = self._all()
        return _message(rows, name=self._name, columns=COLUMNS, leases=self._lease_sums())

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
        self._looks += 1
        before = self._leases
        leases = self._lease_sums() if self._looks % LEASES_EVERY == 0 else before
        return _message(rows, leases=leases) if rows or leases != before else None

    def _lease_sums(self) -> list[int]:
        self._leases = list(self._reader.lease_sums())
        return self._leases


def activity(record: Path) -> bytes:
    """What processes did over the whole run, in `BINS` bins, as the page has it."""
    with closing(Reader(record)) as reader:
        stop_s = reader.end_s()
        return _message(reader.activity(0.0, stop_s, max(stop_s, 1e-9) / BINS))


def _message(rows: Iterable[Row], **more: Any) -> bytes:
    told: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        name = table_name(type(row))
        told.setdefault(name, []).append(_VALUES[name](row))
    return msgspec.json.encode({"rows": told, **more})
