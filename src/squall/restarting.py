"""A run on one machine starts again by itself, as a resume does, when what it cannot go on without has died."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from squall.errors import ProcessLost
from squall.launchers.again import Again, record
from squall.launchers.local import STAY, LocalRun
from squall.protocol.effects import End
from squall.record.rows import StateRow
from squall.report import Reader


class Starts:
    """The first start of a run's processes, and those that follow when they were lost."""

    def __init__(self, path: Path, lock: int, local: LocalRun, another: Callable[[], LocalRun], at_most: int) -> None:
        """`lock` is the descriptor of the directory's; `another` makes what is prepared as `local` was."""
        self.path = path
        self.local = local
        self._lock = lock
        self._another = another
        self._at_most = at_most

    def launch(self, snapshot: int | None) -> None:
        self._again = Again(self.path, snapshot, self._at_most)
        self._launch(snapshot)

    def _launch(self, snapshot: int | None) -> None:
        self.local.launch(self.path, snapshot, self._lock, self._again)

    def again(self, lost: ProcessLost) -> None:
        """Raises what was lost where that is the end: before the training, too, unless it was killed from outside."""
        begun = (self.path / "run.sqlite").exists()
        if not self._at_most or self.local.several or not (begun or self.local.killed):
            raise lost
        if not self.local.gone():
            raise ProcessLost(f"{lost}; {STAY}")
        snapshot = self._again.lost(str(lost))
        self.local.close()
        self.local = self._another()
        self._launch(snapshot)


def record_end(path: Path, end: End) -> None:
    """Of a start that was stopped before it had a coordinator to do so."""
    with closing(Reader(path / "run.sqlite")) as reader:
        over = reader.state().get("status") != "running"
    if not over:
        record(path, StateRow("status", end.status), StateRow("reason", end.reason))
