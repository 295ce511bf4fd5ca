"""Rows that wait to be written into a record: few, however long its disk is full or its file is locked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any, Protocol, Self, cast

from squall.record.rows import KEEP

AT_MOST = 4096  # mergeable rows of a table that wait; if there are more, each two are merged into one


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
        # By table, how many rows there were when each snapshot was asked for that a resume may go back to. Rows of
        # before and after such a moment are not merged.
        self._seals: dict[type, list[int]] = defaultdict(list)
        self._asked: set[type] = set()  # tables whose last seal is not of a published snapshot
        self._limits: dict[type, int] = {}

    def __bool__(self) -> bool:
        return any(self.rows.values()) or any(self.keyed.values())

    def add(self, row: object) -> None:
        table = type(row)
        rows, sealed = self.rows[table], self._seals[table][-1] if self._seals[table] else 0
        rows.append(row)
        if len(rows) - sealed > self._limits.get(table, AT_MOST) and hasattr(row, "merged"):
            rows[sealed:] = _halved(cast("list[Mergeable]", rows[sealed:]))
            self._limits[table] = max(AT_MOST, 4 * len({row.alike() for row in rows[sealed:]}))

    def seal(self) -> None:
        """A snapshot is asked for. A resume may go back to this moment, so rows of before and after it stay apart."""
        for table, rows in self.rows.items():
            seals = self._seals[table]
            if table in self._asked:  # nobody goes back to a snapshot that never was
                seals.pop()
            self._shrink(rows, seals)
            seals.append(len(rows))
            self._asked.add(table)

    def published(self) -> None:
        """The snapshot that was asked for is there; only the one before it is kept beside it."""
        self._asked.clear()
        for seals in self._seals.values():
            del seals[:-KEEP]

    def clear(self) -> None:
        for waiting in (self.rows, self.keyed, self._seals, self._asked, self._limits):
            waiting.clear()

    def _shrink(self, rows: list[Any], seals: list[int]) -> None:
        """Merge rows that were kept apart by seals which are gone."""
        if not rows or not hasattr(rows[0], "merged"):
            return
        begin = 0
        for number, end in enumerate([*seals, len(rows)]):
            shorter = rows[begin:end]
            least = max(AT_MOST, 4 * len({row.alike() for row in shorter}))
            while len(shorter) > least:
                shorter = list(_halved(shorter))
            rows[begin:end] = shorter
            moved = end - begin - len(shorter)
            seals[number:] = [seal - moved for seal in seals[number:]]
            begin = end - moved


def _halved(rows: list[Mergeable]) -> Iterator[Mergeable]:
    """Merge each two alike rows that follow on each other; rows that are left over come last."""
    single: dict[Hashable, Mergeable] = {}
    for row in rows:
        before = single.pop(row.alike(), None)
        if before is None:
            single[row.alike()] = row
        else:
            yield before.merged(row)
    yield from single.values()
