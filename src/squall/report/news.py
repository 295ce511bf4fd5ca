"""What is new in a record since it was looked at last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from squall.record.rows import LeaseRow, Row, StateRow
from squall.report.reader import Reader

# Leases change until the run ends; what is new of the state is found by its values.
FOLLOWED: list[Any] = [table for table in get_args(Row) if table not in (LeaseRow, StateRow)]


class News:
    """Follows the tables of one record."""

    def __init__(self, tables: Iterable[type[Row]] = FOLLOWED) -> None:
        self._seen = dict.fromkeys(tables, 0)  # the last rowid
        self._state: dict[str, str] = {}

    def skip(self, reader: Reader, table: type[Row]) -> None:
        """What there is of that table is known already."""
        self._seen[table] = reader.newest(table)

    def take(self, reader: Reader) -> list[Row]:
        """New facts, and new rows, oldest first in each table."""
        state = reader.state()
        rows: list[Row] = [StateRow(*fact) for fact in state.items() if fact not in self._state.items()]
        self._state = state
        for table in self._seen:
            found, self._seen[table] = reader.since(table, self._seen[table])
            rows += found
        return rows
