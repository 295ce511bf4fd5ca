"""A run that another process has launched: its progress, its end, and to end it.

What it has left needs torch, which is imported when the run is over: nobody who attaches or stops waits for it before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from squall.detaching import Outcome, detached, end_keeper, succeeded
from squall.errors import ProcessLost
from squall.protocol.effects import End
from squall.record.rows import EventRow, Row, StateRow
from squall.report import ProgressViewer, Reader, Viewer, Viewers
from squall.runtime import running
from squall.runtime.lock import LOCK

LOOK_S = 0.1
OUTCOME_WITHIN_S = 10.0  # seconds that a launching process has to say how it has ended, when it has let go of the run


def follow(path: Path, quiet: bool = False) -> None:
    """Show the run's progress until no process of it is left. Raises `ValueError` where there is no run."""
    _check(path)
    if _over(path):
        return
    over, went_back, known = False, False, 0
    while not over or went_back:
        beginning, before = _Beginning(), over
        seen: list[Viewer] = [beginning] if quiet else [ProgressViewer(known=known), beginning]
        with closing(Viewers(path / "run.sqlite", seen)) as viewers:
            viewers.look(time.monotonic())
            while not (over := _over(path)) and beginning.count < 2:
                viewers.look(time.monotonic())
        went_back, known = beginning.count > 1 and not before, beginning.events


class _Beginning:
    """A viewer that notices when training begins again: what was added up of a record that has gone back is wrong."""

    def __init__(self) -> None:
        self.count = 0  # of beginnings
        self.events = 0

    def show(self, rows: Sequence[Row], now: float) -> None:
        self.count += sum(isinstance(row, StateRow) and row.key == "began_at" for row in rows)
        self.events += sum(isinstance(row, EventRow) for row in rows)

    def close(self) -> None:
        pass


def outcome(path: Path) -> Outcome | None:
    """Of a run that is over: what its launching process has left without a terminal; None: the run has finished.

    Raises what `fit` would have raised, where there is only the record to tell.
    """
    if (told := _told(path)) is not None:
        return told
    from squall.attending import begun, raise_for, remedy
    from squall.evaluation_callback import EvaluationCallback

    if not begun(path):
        raise ProcessLost(f"{path} has ended before the training began")
    end = recorded_end(path)
    if end.status == "running":
        raise ProcessLost(f"the processes of {path} are gone, without a word of its end\n{remedy(path)}")
    raise_for(End("interrupted" if end.status == "moved" else end.status, end.reason), path, EvaluationCallback())
    return None


def _told(path: Path) -> Outcome | None:
    """By the last launching process, if it had no terminal and was not killed."""
    last = detached(path)
    if last is None or last.launcher != running.launcher(path):
        return None
    running.wait_gone(last.launcher, OUTCOME_WITHIN_S)
    last = detached(path)
    return last.outcome if last is not None else None


def recorded_end(path: Path) -> End:
    """As far as the record knows."""
    with closing(Reader(path / "run.sqlite")) as reader:
        state = reader.state()
    return End(state.get("status", "running"), state.get("reason", ""))


def stop(path: Path, now: bool = False) -> str:
    """Stop the run and wait until all of its processes are gone; returns what there is, in words."""
    _check(path)
    if running.kept(path):
        raise ValueError(f"{path} is kept for a run that another machine leads: stop it there, by its own directory")
    demand: Callable[[Path], object] = running.kill if now else running.ask_to_stop
    over = done = running.ended(path, 0.0) and not succeeded(path)
    while not done:
        end_keeper(path, now)
        demand(path)  # once, but its launching process may not have been there yet
        done = _over(path)
    _told(path)
    from squall.attending import begun, remedy

    when = "was over already" if over else "is over"
    if not begun(path):
        return f"{path} {when}: nothing was trained"
    end = recorded_end(path)
    status = ("killed" if now and not over else "ended without a word") if end.status == "running" else end.status
    reason = f": {end.reason}" if end.reason else ""
    again = f"; {remedy(path)}" if end.status != "finished" else ""
    return f"{path} {when} ({status}{reason}){again}"


def _over(path: Path) -> bool:
    """After a short wait, if it is not."""
    if not running.ended(path, LOOK_S):
        return False
    if not succeeded(path):
        return True
    time.sleep(LOOK_S)
    return False


def _check(path: Path) -> None:
    if not (path / LOCK).exists() and not (path / "run.sqlite").exists():
        raise ValueError(f"no run at {path}: give the folder of a run, such as runs/<name> (squall ps has those)")
