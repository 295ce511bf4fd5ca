"""Runs as a list, like one of processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, suppress
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from squall.record.rows import RecordError, StateRow
from squall.report.progress import reached
from squall.report.reader import Reader
from squall.report.totals import Totals
from squall.report.words import clock
from squall.runtime.lock import LOCK
from squall.runtime.running import PLAN, living, running, stopping

RUNS = Path("runs")  # where they are by default
HEADINGS = ("RUN", "SINCE", "STRATEGY", "PROGRESS", "STATUS", "PID")


class Listed(NamedTuple):
    """A run. What is not known is empty, or 0."""

    run: str
    since: str  # ISO 8601, of its last launch
    strategy: str
    progress: str
    status: str  # starting, running, stopping, ending (it has no launching process any more), or as in the record
    pid: int  # of its launching process


def listed(directory: Path | None, over: bool) -> list[Listed]:
    """The runs in a directory (None: all of this user's on this machine) that go on; those that are `over`, too."""
    found = running(directory)
    home = directory or RUNS
    places = [home, *home.glob("*")] if over else []
    ended = {path.resolve() for path in places if (path / LOCK).exists() and (path / PLAN).exists()}
    rows = []
    for path in found.keys() | ended:
        with suppress(FileNotFoundError):  # it was removed meanwhile
            rows.append(((path / LOCK).stat().st_mtime, _listed(path, path in found)))
    return [row for _, row in sorted(rows, key=itemgetter(0))]


def _listed(path: Path, goes_on: bool) -> Listed:
    totals = Totals()
    with suppress(RecordError), closing(Reader(path / "run.sqlite")) as reader:
        totals.take([*(StateRow(*fact) for fact in reader.state().items()), *reader.progress()])
    pid = living(path) or 0 if goes_on else 0
    status = _status(path, totals.state.get("status", ""), goes_on, pid)
    progress = reached(totals) if totals.state else ""
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime((path / LOCK).stat().st_mtime))
    return Listed(_name(path), since, totals.state.get("strategy", ""), progress, status, pid)


def _status(path: Path, recorded: str, goes_on: bool, pid: int) -> str:
    if not goes_on:
        return "lost" if recorded in ("", "running") else recorded
    if recorded == "running" and pid:
        return "stopping" if stopping(path) else "running"
    record = path / "run.sqlite"
    begun = record.exists() and record.stat().st_mtime > (path / LOCK).stat().st_mtime  # by this launch
    return "ending" if begun or not pid else "starting"


def _name(path: Path) -> str:
    """As it is typed here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def table(runs: Sequence[Listed]) -> str:
    """With how long ago each was launched."""
    now = time.time()
    rows = [
        (each.run, _ago(now, each.since), each.strategy, each.progress, each.status, str(each.pid or ""))
        for each in runs
    ]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows)]
    lines = ["   ".join(map(str.ljust, row, widths)).rstrip() for row in (HEADINGS, *rows)]
    return "\n".join(lines) + "\n"


def _ago(now: float, since: str) -> str:
    return f"{clock(max(0.0, now - time.mktime(time.strptime(since, '%Y-%m-%dT%H:%M:%S'))))} ago"
