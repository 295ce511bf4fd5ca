"""Reports become fewer as they grow old: a week's would be gigabytes, and a curve shows some hundred moments.

A resume goes back to the moment when a snapshot was asked for, so rows of before and after it are never merged, here
and in `runtime.folding`.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import get_args

from squall.errors import SnapshotMismatch
from squall.record.rows import KEEP, StalenessRow
from squall.record.writer import Record, Report
from squall.runtime.snapshot import Snapshots

FRESH_S = 60.0  # of training time: who watches a run sees these as they came
MOMENTS = 4096  # a row is thinned to the run's 4096th part: after a week to 2.5 minutes


class Thinning:
    """Looks after the reports in a record, of which earlier processes have made those up to `now_s`."""

    def __init__(self, record: Record, now_s: float, snapshots: Snapshots) -> None:
        self._record = record
        self._thinned_s = now_s
        self._kept: list[float] = []  # when the snapshots were asked for that a resume may go back to
        for number in snapshots.numbers():
            with suppress(SnapshotMismatch):  # nobody goes back to a damaged one
                self._kept.append(snapshots.manifest(number).asked_s)
        self._asked_s: float | None = None  # of the one under way

    def asked(self, time_s: float) -> None:
        self._asked_s = time_s

    def published(self) -> None:
        assert self._asked_s is not None
        self._kept = [*self._kept, self._asked_s][-KEEP:]
        self._asked_s = None

    def look(self, now_s: float) -> None:
        """Called often; does something once a minute. Raises `RecordError`."""
        upto = now_s - FRESH_S
        if upto < self._thinned_s + FRESH_S:
            return
        asked = [*self._kept, *([self._asked_s] if self._asked_s is not None else [])]
        for stop in [*(time_s for time_s in asked if time_s < upto), upto]:
            for table in get_args(Report):
                self._record.thin(table, stop, stop / MOMENTS)
        self._record.thin(StalenessRow, min(asked, default=upto), math.inf, again=True)  # nobody asks when
        self._thinned_s = upto
