"""The writer of a run's record, and the tables that it makes of the rows in `squall.record.rows`."""

import math
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from squall.record.backlog import Backlog
from squall.record.rows import (
    ActivityRow,
    ExtraRow,
    LeaseRow,
    LossRow,
    MetricRow,
    PartRow,
    ProgressRow,
    RecordError,
    Row,
    SkipRow,
    StalenessRow,
    StateRow,
    record_error,
    table_name,
)

Report = ProgressRow | PartRow | ActivityRow | ExtraRow | StalenessRow

COMMIT_EVERY_S = 0.2
PAUSE_AT_MOST_S = 5.0  # between tries to write into a file that is locked, or onto a disk that is full
OPEN_S = 2.0  # for which a lock is waited for when the file is opened and closed
BUSY_S = 0.02  # for which a lock is waited for while training goes on

# SQLite keeps NaN as NULL, and a loss may well be NaN: so only REAL columns may be NULL.
SQL_TYPE = {float: "REAL", int: "INTEGER NOT NULL", str: "TEXT NOT NULL"}
_COLUMNS: dict[type[Row], list[tuple[str, Any]]] = {
    table: [(field.name, field.type) for field in fields(table)] for table in get_args(Row)
}
# A second row with the key takes the place of the first.
_KEYS: dict[type[Row], str] = {LeaseRow: "lease", StateRow: "key"}


def _schema(table: type[Row]) -> str:
    columns = [f"{name} {SQL_TYPE[kind]}" for name, kind in _COLUMNS[table]]
    key = f", PRIMARY KEY ({_KEYS[table]})" if table in _KEYS else ""
    return f"CREATE TABLE IF NOT EXISTS {table_name(table)} ({', '.join(columns)}{key})"


def _insert(table: type[Row]) -> str:
    marks = ", ".join("?" for _ in _COLUMNS[table])
    return f"INSERT OR REPLACE INTO {table_name(table)} VALUES ({marks})"


def _delete(table: type[Row]) -> str:
    return f"DELETE FROM {table_name(table)} WHERE {_KEYS[table]} = ?"


def _values(row: Row) -> tuple[Any, ...]:
    # The conversion admits NumPy and torch scalars, which SQLite would store as bytes or refuse.
    return tuple(kind(getattr(row, name)) for name, kind in _COLUMNS[type(row)])


class Record:
    """The writer. One process has it: the coordinator, and when that has closed it the nursery of a script's run.

    A resumed run appends to its file.
    """

    def __init__(self, path: str | Path, busy_s: float = BUSY_S) -> None:
        """Open `path`, or create it; a commit waits `busy_s` seconds for a lock before it raises."""
        self.path = Path(path)
        self._backlog = Backlog()
        self.told = 0  # how many things the rows are of that are written, or wait: a process that goes on counts alike
        self._known = -1  # of these, those of which the process before this one has written the rows
        self._committed = self._again_at = -math.inf  # the `now` of the last commit; not before this one
        self._pause_s = 0.0  # until the next try, after one that failed
        self._thinned: dict[type[Row], int] = {}  # table -> rowid up to which it was thinned
        try:
            # SQLite would create it 0644 under the usual umask; its -wal and -shm files copy this mode.
            with suppress(FileExistsError):
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except OSError as error:
            raise RecordError(f"cannot create {self.path}: {error.strerror}") from error
        self._busy_s = busy_s
        self._open()
        with self._transaction("open"):
            for table in _COLUMNS:
                self._make(table)
        self._wait_for_locks(busy_s)

    def _open(self) -> None:
        try:
            self._db = sqlite3.connect(self.path, timeout=OPEN_S, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            # A killed process loses nothing that was committed; a power cut may lose the last commits.
            self._db.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.Error as error:
            raise record_error("open", self.path, error) from error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_db"}

    def go_on(self) -> None:
        """In another process, with what a killed one has kept: the rows that it has written since are not added again.

        Raises `RecordError`.
        """
        self._open()
        self._wait_for_locks(self._busy_s)
        (self._known,) = self._read("PRAGMA user_version")[0]
        if self._known >= self.told:
            self._backlog.clear()
        self._again_at = -math.inf

    def _make(self, table: type[Row]) -> None:
        """Make a table, or add the columns that it did not have when the record was begun."""
        self._db.execute(_schema(table))
        there = {name for _, name, *_ in self._db.execute(f"PRAGMA table_info({table_name(table)})")}
        for field in fields(table):
            if field.name not in there:
                kind = f"{SQL_TYPE[cast('type', field.type)]} DEFAULT {field.default!r}"
                self._db.execute(f"ALTER TABLE {table_name(table)} ADD COLUMN {field.name} {kind}")

    def _wait_for_locks(self, seconds: float) -> None:
        self._db.execute(f"PRAGMA busy_timeout = {round(1000 * seconds)}")

    @contextmanager
    def _patience(self) -> Iterator[None]:
        """Wait for locks as long as when the file was opened."""
        self._wait_for_locks(OPEN_S)
        yield
        self._wait_for_locks(self._busy_s)

    @contextmanager
    def _transaction(self, doing: str = "write") -> Iterator[None]:
        """Write all of it or nothing. A lock of others is met at its beginning. Raises `RecordError`."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):  # SQLite has done so after some errors
                self._db.execute("ROLLBACK")
            raise record_error(doing, self.path, error) from error

    def add(self, row: Row) -> None:
        """Take one row; `commit` writes it. One with a key takes the place of the one that has it."""
        table = type(row)
        if self.told <= self._known:
            return
        if table in _KEYS:
            self._backlog.keyed[table][getattr(row, _KEYS[table])] = row
        else:
            self._backlog.add(row)

    def remove(self, row: LeaseRow) -> None:
        """Delete the row with this one's key, at the next commit."""
        if self.told <= self._known:
            return
        self._backlog.keyed[LeaseRow][row.lease] = None

    def seal(self) -> None:
        """A snapshot is asked for: `rewind` may go back to this moment."""
        self._backlog.seal()

    def published(self) -> None:
        """The snapshot that was asked for is complete."""
        self._backlog.published()

    def commit(self, now: float, force: bool = False) -> bool:
        """Write what waits in one transaction, at most every 0.2 s unless forced; tell whether it did.

        `now` is in seconds on any steady clock. After a RecordError there is no try for a while: 0.2 s, then twice as
        long each time, up to 5 s. What waits meanwhile is kept, reports in fewer rows (see `squall.record.backlog`).
        """
        due = now >= self._again_at and (force or now - self._committed >= COMMIT_EVERY_S)
        if not due or not self._backlog:
            return False
        try:
            self._write()
        except RecordError:
            self._pause_s = min(max(2 * self._pause_s, COMMIT_EVERY_S), PAUSE_AT_MOST_S)
            self._again_at = now + self._pause_s
            raise
        self._pause_s, self._again_at, self._committed = 0.0, -math.inf, now
        return True

    def _write(self) -> None:
        if not self._backlog:
            return
        with self._transaction():
            self._insert_waiting()
            self._db.execute(f"PRAGMA user_version = {self.told}")
        self._backlog.clear()

    def _insert_waiting(self) -> None:
        for table, keyed in self._backlog.keyed.items():
            gone = [(key,) for key, row in keyed.items() if row is None]
            self._db.executemany(_delete(table), gone)
            self._db.executemany(_insert(table), [_values(row) for row in keyed.values() if row is not None])
        for table, rows in self._backlog.rows.items():
            self._db.executemany(_insert(table), map(_values, rows))

    def secure(self) -> None:
        """Write what waits, and have it on the disk, where a power cut leaves it. Raises `RecordError`."""
        self._db.execute("PRAGMA synchronous = FULL")
        try:
            self._write()
        finally:
            self._db.execute("PRAGMA synchronous = NORMAL")

    def waiting(self) -> bytes:
        """What is not written yet, for the `take_in` of a resumed run."""
        kept = self._backlog
        rows = {table_name(table): [_values(row) for row in found] for table, found in kept.rows.items()}
        keyed = {
            table_name(table): [(key, None if row is None else _values(row)) for key, row in found.items()]
            for table, found in kept.keyed.items()
        }
        return msgspec.msgpack.encode((rows, keyed))

    def take_in(self, snapshot: int, waiting: bytes) -> None:
        """Write what an earlier process could not when it made that snapshot, nor later. Raises `RecordError`."""
        if int(self.fact("snapshot") or 0) >= snapshot:
            return
        rows, keyed = msgspec.msgpack.decode(waiting)
        for table in _COLUMNS:
            made: Any = table
            self._backlog.rows[table] += [made(*values) for values in rows.get(table_name(table), ())]
            for key, values in keyed.get(table_name(table), ()):
                self._backlog.keyed[table][key] = None if values is None else made(*values)
        with self._patience():
            self._write()

    def fact(self, key: str) -> str | None:
        """The value of a `StateRow` that is written; None if there is none."""
        found: list[tuple[str]] = self._read("SELECT value FROM state WHERE key = ?", key)
        return found[0][0] if found else None

    def skips(self, leases: Iterable[int]) -> list[SkipRow]:
        """The examples of these leases that scripts left out, as far as they are written."""
        return [
            SkipRow(*row) for row in self._read(f"SELECT * FROM skip WHERE lease IN ({', '.join(map(str, leases))})")
        ]

    def _read(self, query: str, *values: str) -> list[Any]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise record_error("read", self.path, error) from error

    def thin(self, table: type[Report], upto_s: float, width_s: float, again: bool = False) -> None:
        """Merge rows up to that training time within bins of `width_s`; those that were merged before only `again`.

        A merged row has the place of the last of them, so that whoever has read that far does not read it again.
        """
        made: Any = table
        name, behind = table_name(table), 0 if again else self._thinned.get(table, 0)
        where = f"FROM {name} WHERE rowid > ? AND time_s <= ?"
        with self._transaction():
            kept: dict[Any, tuple[int, Any]] = {}
            for place, *values in self._db.execute(f"SELECT rowid, * {where} ORDER BY rowid", (behind, upto_s)):
                row = made(*(math.nan if value is None else value for value in values))
                key = (row.alike(), row.time_s // width_s)
                kept[key] = (place, kept[key][1].merged(row) if key in kept else row)
            self._db.execute(f"DELETE {where}", (behind, upto_s))
            columns = ", ".join(["rowid", *(column for column, _ in _COLUMNS[table])])
            rows = [(place, *_values(row)) for place, row in kept.values()]
            self._db.executemany(f"INSERT INTO {name} ({columns}) VALUES (?{', ?' * len(_COLUMNS[table])})", rows)
        self._thinned[table] = max([self._thinned.get(table, 0), *(place for place, _ in kept.values())])

    def rewind(self, time_s: float, first_lease: int, next_lease: int, leases: Sequence[int]) -> None:
        """Forget what a resumed run has lost: rows of training after `time_s`, and of leases that are dealt again.

        Leases from `first_lease` on and those named go. What was skipped stays, also of these, up to `next_lease`: a
        lease of which the snapshot holds something is told anew. What waits is written as well.
        """
        with self._patience(), self._transaction():
            for table in (*get_args(Report), MetricRow, LossRow):
                self._db.execute(f"DELETE FROM {table_name(table)} WHERE time_s > ?", (time_s,))
            self._db.execute("DELETE FROM lease WHERE lease >= ?", (first_lease,))
            self._db.execute("DELETE FROM skip WHERE lease >= ?", (next_lease,))
            self._db.executemany(_delete(LeaseRow), [(lease,) for lease in leases])
            self._insert_waiting()
            self._db.execute("PRAGMA user_version = 0")
        self._backlog.clear()

    def close(self) -> None:
        """Write the rest and close the file."""
        try:
            self._wait_for_locks(OPEN_S)
            self._write()
        finally:
            self._db.close()
