"""A run on one machine starts again by itself, as a resume does, when what it cannot go on without has died."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from msgspec import UNSET

from squall.errors import ProcessLost, SquallError
from squall.launchers.local import LocalRun
from squall.protocol.effects import End
from squall.record.rows import EventRow, RecordError, Row, StateRow
from squall.record.writer import Record
from squall.report import Reader
from squall.report.words import clock, plural
from squall.runtime.snapshot import Snapshots


class Starts:
    """The first start of a run's processes, and those that follow when they were lost.

    They are as many in a row as are allowed; one that has left a snapshot of its own is followed by as many again.
    """

    def __init__(self, path: Path, lock: int, local: LocalRun, another: Callable[[], LocalRun], at_most: int) -> None:
        """`lock` is the descriptor of the directory's; `another` makes what is prepared as `local` was."""
        self.path = path
        self.local = local
        self._lock = lock
        self._another = another
        self._at_most = at_most
        self._snapshot: int | None = None  # that the last one went on from
        self._again = 0  # how often since there was a new one

    def launch(self, snapshot: int | None) -> None:
        self._snapshot = snapshot
        self.local.launch(self.path, snapshot, self._lock)

    def again(self, lost: ProcessLost) -> None:
        """Raises what was lost where that is the end: before the training, too, when nothing would be repeated."""
        if not self._at_most or self.local.several or not (self.path / "run.sqlite").exists():
            raise lost
        if not self.local.gone():
            raise ProcessLost(f"{lost}; others of its processes do not end, so that it was not started again")
        snapshot = Snapshots(self.path).newest()
        self._again = 0 if snapshot != self._snapshot else self._again
        if self._again == self._at_most:
            often = "once" if self._again == 1 else f"{self._again} times"
            raise ProcessLost(f"{lost}; it had been started again {often}, without a new snapshot")
        self._again += 1
        where = "from the beginning (no snapshot was written yet)" if snapshot is None else f"from snapshot {snapshot}"
        repeated = unsaved(self.path, snapshot)
        text = f"{lost}; starting again {where}" + (f": {repeated} are repeated" if repeated else "")
        sys.stderr.write(f"squall: {text} (restart {self._again} of {self._at_most})\n")
        sys.stderr.flush()
        with closing(Reader(self.path / "run.sqlite")) as reader:
            ended_s = reader.end_s()
        _record(self.path, EventRow(ended_s, "restarted", text))
        self.local.close()
        self.local = self._another()
        self.launch(snapshot)


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


def record_end(path: Path, end: End) -> None:
    """Of a start that was stopped before it had a coordinator to do so."""
    with closing(Reader(path / "run.sqlite")) as reader:
        over = reader.state().get("status") != "running"
    if not over:
        _record(path, StateRow("status", end.status), StateRow("reason", end.reason))


def _record(path: Path, *rows: Row) -> None:
    """Nobody else writes now: the coordinator is gone."""
    try:
        with closing(Record(path / "run.sqlite")) as record:
            for row in rows:
                record.add(row)
    except RecordError as error:
        warnings.warn(f"the record does not say that the run started again: {error}", RuntimeWarning, stacklevel=2)
