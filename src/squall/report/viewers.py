"""Who looks at a run while it goes on: each is shown what is new in its record."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from squall.record.rows import RecordError, Row
from squall.report.news import News
from squall.report.reader import Reader

LOOK_EVERY_S = 0.25  # quick enough to look alive, and a few small queries four times a second are cheap


class Viewer(Protocol):
    """Shows a run to somebody, in the launching process. It has no thread, and is back within milliseconds."""

    def show(self, rows: Sequence[Row], now: float) -> None:
        """Show the new rows, oldest first in each table (all but leases). Called often, also when nothing is new.

        `now` is in seconds, on a clock that does not go back.
        """

    def close(self) -> None:
        """No more rows will come. How the run has ended was among them, if it could be written."""


class Viewers:
    """All viewers of one run. They begin when it has a record; one that fails leaves the others alone."""

    def __init__(self, path: Path, viewers: Sequence[Viewer]) -> None:
        self._path = path  # of the record
        self._viewers = list(viewers)
        self._reader: Reader | None = None
        self._looked = -math.inf
        self._news = News()

    def look(self, now: float) -> None:
        """Show what is new; to be called often."""
        if self._viewers and now - self._looked >= LOOK_EVERY_S and self._path.exists():
            self._looked = now
            self._show()

    def close(self) -> None:
        """Show the end."""
        if self._reader is not None:
            self._show()
            self._each(lambda viewer: viewer.close())
            self._reader.close()

    def _show(self) -> None:
        try:
            self._reader = self._reader or Reader(self._path)
            rows = self._news.take(self._reader)
        except RecordError:
            self._each(lambda viewer: viewer.close())
            self._viewers.clear()
        else:
            self._each(lambda viewer: viewer.show(rows, self._looked))

    def _each(self, do: Callable[[Viewer], None]) -> None:
        """A closed pipe, which rich turns into SystemExit, or a lost terminal only ends that view."""
        for viewer in list(self._viewers):
            try:
                do(viewer)
            except (Exception, SystemExit):
                self._viewers.remove(viewer)
                with suppress(Exception, SystemExit):
                    viewer.close()
