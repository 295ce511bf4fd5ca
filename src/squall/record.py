"""The run's one transactional record, ``runs/<name>/run.sqlite``: what is in it, and its writer.

`squall.report.Reader` reads the file in any other process while the writer goes on (SQLite's write-ahead log:
neither waits for the other). One frozen dataclass is one table, its fields are the columns.

``time_s`` is everywhere *training time*: seconds since the first replica was welcomed, and while replicas trained.
"""

import math
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

COMMIT_EVERY_S = 0.2


class RecordError(RuntimeError):
    """The record cannot be written or read; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One validation result. Names are ``loss`` and those of `Task.metrics`.

    All but the value is of the moment when the weights that were measured had been fetched.
    """

    time_s: float
    epoch: int
    examples: int  # applied by all shards
    updates: int  # applied by all shards
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Progress:
    """What one replica did since its last report; `loss` is the mean training loss per example in it."""

    time_s: float
    replica: int
    examples: int
    batches: int
    loss: float
    compute_s: float
    wait_s: float
    pushed_bytes: int
    fetched_bytes: int


@dataclass(frozen=True, slots=True)
class Staleness:
    """How many of a replica's pushes were applied with this staleness since its last report."""

    time_s: float
    replica: int
    staleness: int  # updates
    count: int  # pushes


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that ended: ``[start, trained_stop)`` of the epoch's order was trained, the rest given back."""

    lease: int
    epoch: int
    start: int
    stop: int
    replica: int
    incarnation: int
    granted_s: float
    ended_s: float
    trained_stop: int


@dataclass(frozen=True, slots=True)
class Member:
    """A process came or went."""

    node: str
    pid: int
    time_s: float
    change: str  # joined, lost, left
    why: str


@dataclass(frozen=True, slots=True)
class Event:
    """What a person would want to be told."""

    time_s: float
    # started, lost, replaced, snapshot, nonfinite, warning, reached, stopped, finished, error
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class State:
    """One fact about the whole run; writing a key again replaces its value."""

    # epochs, examples_per_epoch, replicas, shards, strategy, status, training_s, updates,
    # ended: a `protocol.core.Cause`, once it has; reason: the same in words
    # batch: examples of each evaluation, where the method looks at batches as a whole and deals no leases
    # first_step_s: seconds from the command to the first training step
    key: str
    value: str


Row = Metric | Progress | Staleness | Lease | Member | Event | State

# SQLite keeps NaN as NULL, and a loss may well be NaN: so only REAL columns may be NULL.
_SQL_TYPE = {float: "REAL", int: "INTEGER NOT NULL", str: "TEXT NOT NULL"}
_COLUMNS: dict[type[Row], list[tuple[str, Any]]] = {
    table: [(field.name, field.type) for field in fields(table)] for table in get_args(Row)
}
_REMEDY = {
    sqlite3.SQLITE_BUSY: "another process is writing to it: is this run already being trained?",
    sqlite3.SQLITE_FULL: "free some space on its disk, then resume the run",
    sqlite3.SQLITE_IOERR: "the disk is failing, or a limit on file size was met",
    sqlite3.SQLITE_READONLY: "give this user the right to write to it and to its folder",
    sqlite3.SQLITE_CANTOPEN: "check that its folder exists and may be written to",
    sqlite3.SQLITE_CORRUPT: "it is damaged: restore it from a copy or start a new run",
    sqlite3.SQLITE_NOTADB: "it is no record of a run: move it away",
}


def record_error(doing: str, path: Path, cause: sqlite3.Error) -> RecordError:
    """SQLite's complaint as ours: what was being done, to which file, and the remedy where one is known."""
    # The low byte of an extended result code is the primary one (sqlite.org/rescode.html).
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    remedy = f"; {_REMEDY[code]}" if code in _REMEDY else ""
    return RecordError(f"cannot {doing} {path}: {cause}{remedy}")


def _schema(table: type[Row]) -> str:
    columns = [f"{name} {_SQL_TYPE[kind]}" for name, kind in _COLUMNS[table]]
    key = ", PRIMARY KEY (key)" if table is State else ""
    return f"CREATE TABLE IF NOT EXISTS {table.__name__.lower()} ({', '.join(columns)}{key})"


def _insert(table: type[Row]) -> str:
    marks = ", ".join("?" for _ in _COLUMNS[table])
    replace = " ON CONFLICT (key) DO UPDATE SET value = excluded.value" if table is State else ""
    return f"INSERT INTO {table.__name__.lower()} VALUES ({marks}){replace}"


class Record:
    """The writer, owned by exactly one process, the coordinator. A resumed run appends to its file."""

    def __init__(self, path: str | Path, busy_s: float = 2.0) -> None:
        """Open `path`, or create it; a commit waits `busy_s` seconds for a lock before it raises."""
        self.path = Path(path)
        self._buffer: dict[type[Row], list[tuple[Any, ...]]] = {table: [] for table in _COLUMNS}
        self._committed = -math.inf  # the `now` of the last commit
        try:
            # SQLite would create it 0644 under the usual umask; its -wal and -shm files copy this mode.
            with suppress(FileExistsError):
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except OSError as error:
            raise RecordError(f"cannot create {self.path}: {error.strerror}") from error
        try:
            self._db = sqlite3.connect(self.path, timeout=busy_s)
            self._db.execute("PRAGMA journal_mode = WAL")
            # A killed process loses nothing that was committed; a power cut may lose the last commits.
            self._db.execute("PRAGMA synchronous = NORMAL")
            with self._db:
                for table in _COLUMNS:
                    self._db.execute(_schema(table))
        except sqlite3.Error as error:
            raise record_error("open", self.path, error) from error

    def add(self, row: Row) -> None:
        """Buffer one row; `commit` writes it."""
        table = type(row)
        # The conversion admits NumPy and torch scalars, which SQLite would store as bytes or refuse.
        self._buffer[table].append(tuple(kind(getattr(row, name)) for name, kind in _COLUMNS[table]))

    def commit(self, now: float, force: bool = False) -> bool:
        """Write what is buffered in one transaction, at most every 0.2 s unless forced; tell whether it did.

        `now` is in seconds on any steady clock. After a RecordError the next commit tries again.
        """
        if not (force or now - self._committed >= COMMIT_EVERY_S) or not any(self._buffer.values()):
            return False
        try:
            with self._db:
                for table, rows in self._buffer.items():
                    self._db.executemany(_insert(table), rows)
        except sqlite3.Error as error:
            raise record_error("write", self.path, error) from error
        for rows in self._buffer.values():
            rows.clear()
        self._committed = now
        return True

    def secure(self) -> None:
        """Write what is buffered, and have it on the disk, where a power cut leaves it. Raises `RecordError`."""
        self._db.execute("PRAGMA synchronous = FULL")
        try:
            self.commit(self._committed, force=True)
        finally:
            self._db.execute("PRAGMA synchronous = NORMAL")

    def rewind(self, time_s: float, first_lease: int, leases: Sequence[int]) -> None:
        """Forget what a resumed run has lost: rows of training after `time_s`, and of leases that are dealt again."""
        try:
            with self._db:
                for table in (Progress, Staleness, Metric):
                    self._db.execute(f"DELETE FROM {table.__name__.lower()} WHERE time_s > ?", (time_s,))
                self._db.execute("DELETE FROM lease WHERE lease >= ?", (first_lease,))
                self._db.executemany("DELETE FROM lease WHERE lease = ?", [(lease,) for lease in leases])
        except sqlite3.Error as error:
            raise record_error("write", self.path, error) from error

    def close(self) -> None:
        """Write the rest and close the file."""
        try:
            self.commit(self._committed, force=True)
        finally:
            self._db.close()


def settle(path: Path) -> None:
    """Fold the write-ahead log into the file, once nobody uses it: a finished run's record is one file to copy."""
    # An error: somebody else reads it. Then it stays as it is, which is no less valid.
    with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
