"""How often a run begins again by itself, from where, and what is said of that."""

from __future__ import annotations

import sys
import warnings
from contextlib import closing
from pathlib import Path

from msgspec import UNSET

from squall.errors import ProcessLost, SquallError
from squall.record.rows import EventRow, RecordError, Row
from squall.record.writer import Record
from squall.report import Reader
from squall.report.words import clock, plural
from squall.runtime.snapshot import Snapshots


class Again:
    """Starts in a row are as many as are allowed; one that has left a snapshot of its own is followed by as many."""

    def __init__(self, path: Path, snapshot: int | None, at_most: int) -> None:
        """`snapshot`: that the first one goes on from."""
        self._path, self._at_most = path, at_most
        self._snapshot = snapshot  # that the last one went on from
        self._count = 0  # how often since there was a new one

    @property
    def allowed(self) -> bool:
        return self._at_most > 0

    def lost(self, why: str) -> int | None:
        """What the run cannot go on without is lost. Returns the snapshot that it begins again from.

        Raises `ProcessLost` where it has done so often enough.
        """
        if self._goes_on(Snapshots(self._path).newest()):
            self._count = 0
        if self._count == self._at_most:
            often = "once" if self._count == 1 else f"{self._count} times"
            raise ProcessLost(f"{why}; it had been started again {often}, without a new snapshot")
        self._count += 1
        text = f"{why}; starting again {self._from_where()}"
        _say(f"{text} (restart {self._count} of {self._at_most})")
        self._record(text)
        return self._snapshot

    def moved(self, why: str) -> int | None:
        """As `lost`, to go on on the machines that stay. One that has left in order has a snapshot behind it."""
        if not self._goes_on(Snapshots(self._path).newest()):
            return self.lost(why)
        self._count = 0
        text = f"{why}; going on {self._from_where()}"
        _say(text)
        if unsaved(self._path, self._snapshot):
            self._record(text)
        return self._snapshot

    def _goes_on(self, snapshot: int | None) -> bool:
        """From a newer one than before."""
        before, self._snapshot = self._snapshot, snapshot
        return snapshot != before

    def _from_where(self) -> str:
        number = self._snapshot
        where = "from the beginning (no snapshot was written yet)" if number is None else f"from snapshot {number}"
        repeated = unsaved(self._path, number)
        return where + (f": {repeated} are repeated" if repeated else "")

    def _record(self, text: str) -> None:
        if not (self._path / "run.sqlite").exists():
            return  # it has not begun
        with closing(Reader(self._path / "run.sqlite")) as reader:
            ended_s = reader.end_s()
        record(self._path, EventRow(ended_s, "restarted", text))


def _say(text: str) -> None:
    sys.stderr.write(f"squall: {text}\n")
    sys.stderr.flush()


def unsaved(path: Path, snapshot: int | None) -> str:
    """What was trained since a snapshot (None: since the beginning), in words; empty where that is nothing."""
    try:
        with closing(Reader(path / "run.sqlite")) as reader:
            work = reader.progress()  # a row a replica
        manifest = Snapshots(path).manifest(snapshot) if snapshot is not None else None
    except (RecordError, SquallError):
        return ""  # a resume says what is wrong
    seconds = max((each.time_s for each in work), default=0.0) - (manifest.trained_s if manifest is not None else 0.0)
    if seconds < 0.05:
        return ""
    lost = sum(each.examples for each in work)
    if manifest is not None:
        lost = lost - min(manifest.examples) if manifest.examples is not UNSET else 0
    examples = f" ({plural(lost, 'example')})" if lost > 0 else ""
    return f"the last {clock(seconds)} of training{examples}"


def record(path: Path, *rows: Row) -> None:
    """Nobody else writes now: the coordinator is gone."""
    try:
        with closing(Record(path / "run.sqlite")) as record:
            for row in rows:
                record.add(row)
    except RecordError as error:
        warnings.warn(f"the record does not say that the run started again: {error}", RuntimeWarning, stacklevel=2)
