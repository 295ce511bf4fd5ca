"""Rows that wait to be written into a record: few, however long its disk is full or its file is locked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any, Protocol, Self, cast

AT_MOST = 4096  # mergeable rows of a table that wait; of more, two each become one


class Mergeable(Protocol):
    def alike(self) -> Hashable:
        """What two rows must share to be merged."""

    def merged(self, later: Self) -> Self:
        """One row for this one and a later one."""


class Backlog:
    """By table: rows in the order in which they came, and rows with a key, of which the last counts.

    Where too many wait, those that can be merged are. What an audit needs has a key, and is never lost.
    """

    def __init__(self) -> None:
        self.rows: dict[type, list[Any]] = defaultdict(list)
        self.keyed: dict[type, dict[Hashable, Any]] = defaultdict(dict)  # None: the row is to be deleted
        self._sealed: dict[type, int] = defaultdict(int)  # rows that are not merged with later ones
        self._limits: dict[type, int] = defaultdict(lambda: AT_MOST)

    def __bool__(self) -> bool:
        return any(self.rows.values()) or any(self.keyed.values())

    def add(self, row: object) -> None:
        table = type(row)
        rows, sealed = self.rows[table], self._sealed[table]
        rows.append(row)
        if len(rows) - sealed > self._limits[table] and hasattr(row, "merged"):
            rows[sealed:] = _halved(cast("list[Mergeable]", rows[sealed:]))
            self._limits[table] = max(AT_MOST, 4 * len({row.alike() for row in rows[sealed:]}))

    def seal(self) -> None:
        """A resume may go back to this moment, so rows of before and after it stay apart."""
        for table, rows in self.rows.items():
            self._sealed[table] = len(rows)

    def clear(self) -> None:
        for waiting in (self.rows, self.keyed, self._sealed, self._limits):
            waiting.clear()


def _halved(rows: list[Mergeable]) -> Iterator[Mergeable]:
    """Rows that follow on each other among those that are alike become one; single ones are last."""
    single: dict[Hashable, Mergeable] = {}
    for row in rows:
        before = single.pop(row.alike(), None)
        if before is None:
            single[row.alike()] = row
        else:
            yield before.merged(row)
    yield from single.values()
