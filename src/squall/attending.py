"""From a run's launch to its end, as the launching process sees it: progress, signals, report, and what is raised."""

from __future__ import annotations

import math
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from squall.errors import Interrupted, LostAlone, NotFinite, ProcessLost, SquallError, TaskError
from squall.evaluation_callback import EvaluationCallback
from squall.launchers.again import unsaved
from squall.protocol.effects import End
from squall.record.rows import EventRow
from squall.record.settling import settle
from squall.report import ProgressViewer, Reader, Viewer, Viewers, prepare_report
from squall.report.tensorboard import TensorBoardViewer, write_record
from squall.restarting import Starts, record_end
from squall.run import Run
from squall.runtime.answers import described
from squall.runtime.interrupts import collected_interrupts
from squall.runtime.snapshot import Snapshots
from squall.settings import Settings
from squall.usercode.kept import load_sources

POLL_S = 0.1
BEFORE = "interrupted before the training began"
PREPARE_REPORT_AFTER_S = 5.0  # in a short run it would only take time from the training


def attend(
    starts: Starts, snapshot: int | None, settings: Settings, watch: EvaluationCallback, begins: Callable[[Path], None]
) -> None:  # fmt: skip
    """Launch the run's processes and stay until they have ended; raises what ended them, if that was not their work.

    `snapshot` is the number of the one to go on from; `begins` is called when all is well until the training.
    """
    path = starts.path
    try:
        try:
            starts.launch(snapshot)
            end = _attend(starts, settings, watch, begins)
        finally:  # before anything is said: what there is to go on with is what it has written by then
            with collected_interrupts():  # one more Ctrl-C does not hide how the run has ended
                starts.local.close()  # no process of the run lives on while its report is drawn
    except (ProcessLost, TaskError) as error:
        if not begun(path):
            raise
        if isinstance(error, TaskError):
            raise TaskError(f"{error}\n\n{mended(path)}", error.failure) from None
        if isinstance(error, LostAlone):
            raise LostAlone(f"{error} again; with --complete {path} all of it is here at its end") from None
        raise ProcessLost(f"{error}\n{remedy(path)}") from None
    except KeyboardInterrupt:
        raise _interrupted("interrupted at once" if begun(path) else BEFORE, path) from None
    raise_for(end, path, watch)


def _attend(starts: Starts, settings: Settings, watch: EvaluationCallback, begins: Callable[[Path], None]) -> End:
    """Through all starts."""
    with collected_interrupts(requests=2) as interrupts:
        known = 0  # events that were shown
        while True:
            with closing(Viewers(starts.path / "run.sqlite", viewers(settings, starts, known))) as shown:
                try:
                    end = _attend_one(starts, shown, interrupts, watch, begins)
                    if known and end.status == "interrupted":
                        record_end(starts.path, end)
                    return end
                except ProcessLost as error:
                    lost = error
            if interrupts or watch.why:  # it was to end
                raise lost
            starts.again(lost)
            known = _events(starts.path)


def viewers(settings: Settings, starts: Starts, known: int) -> list[Viewer]:
    """Everything that shows the run while it goes on, less the first events, which are `known`."""
    found: list[Viewer] = []
    if settings.progress:
        found.append(ProgressViewer(causes=lambda: starts.local.standing_still(), known=known))
    return [*found, TensorBoardViewer(starts.path)] if settings.tensorboard else found


def _events(path: Path) -> int:
    if not begun(path):
        return 0
    with closing(Reader(path / "run.sqlite")) as reader:
        return reader.newest(EventRow)


def _attend_one(
    starts: Starts, shown: Viewers, interrupts: list[int], watch: EvaluationCallback, begins: Callable[[Path], None]
) -> End:  # fmt: skip
    """From one launch to its end. `interrupts` grows."""
    path, local, heeded = starts.path, starts.local, 0
    prepare_at = time.monotonic() + PREPARE_REPORT_AFTER_S
    while local.ended is None:
        local.attend(POLL_S, watch)
        if not path.is_dir():
            raise SquallError(f"{path} was removed while the run went on: nothing can be saved, and it is ended")
        if local.listening and begun(path):
            begins(path)
            shown.look(time.monotonic())
        if time.monotonic() >= prepare_at and begun(path):
            prepare_at = math.inf
            threading.Thread(target=prepare_report, daemon=True).start()  # a second, in which Ctrl-C is heard
        if heeded < len(interrupts):
            heeded += 1
            local.stop()
    return local.ended


def finish(run: Run, again: bool = False, unwatched: bool = False) -> None:
    """Write the run's report, however the run ended. A failure of the report must not hide why it ended.

    A run that has not begun leaves no directory, unless it was to go on with an older one. `unwatched`: no viewer has
    written what TensorBoard is to show.
    """
    if not begun(run.directory):
        if not again:
            shutil.rmtree(run.directory, ignore_errors=True)
        return
    try:
        run.report()
        if unwatched:
            write_record(run.directory)
        settle(run.directory / "run.sqlite")
    except (Exception, KeyboardInterrupt) as error:
        warnings.warn(f"the report of {run.directory} could not be written: {error}", RuntimeWarning, stacklevel=2)


def remedy(path: Path, command: str = "squall resume {path}") -> str:
    """What was kept, and what goes on with it."""
    if (prediction := described(path)) is not None:
        return f"what is answered is kept; {prediction['again']}"
    number = Snapshots(path).numbers()
    where = f"from snapshot {number[-1]}" if number else "from the beginning (no snapshot was written yet)"
    lost = unsaved(path, number[-1]) if number else ""
    go_on = f"go on {where} with: {command.format(path=str(path))}"
    return f"{lost} are not saved; {go_on}" if lost else go_on


def _interrupted(reason: str, path: Path) -> Interrupted:
    return Interrupted(f"{reason}; {remedy(path)}" if begun(path) else reason)


def mended(path: Path) -> str:
    """The remedy where the user's own code has failed."""
    if described(path) is not None:
        return f"mend it: {remedy(path)}"
    file = load_sources(path).file
    if file:
        return f"mend it, and {remedy(path)} (which reads {file} again)"
    return f"mend it, and {remedy(path, 'squall.resume({path!r}, task=...)')}, with the mended function"


def begun(path: Path) -> bool:
    """Whether the run has a record: there is something to go on with, or to look at."""
    return (path / "run.sqlite").exists()


def raise_for(end: End, path: Path, watch: EvaluationCallback) -> None:
    """Raise the exception of a run that has not ended well: first of all the user's own."""
    if watch.error is not None:
        watch.error.add_note(remedy(path, "squall.resume({path!r}, on_evaluation=...)"))
        raise watch.error
    if end.status == "interrupted":
        raise _interrupted(end.reason, path)
    if end.status == "nonfinite":
        raise NotFinite(f"{end.reason}. Last good weights: {path / 'snapshots'}")
    if end.status == "failed":
        raise SquallError(f"{end.reason}\n{remedy(path)}")
