"""From a run's launch to its end, as the launching process sees it: progress, signals, report, and what is raised."""

from __future__ import annotations

import math
import shutil
import threading
import time
import warnings
from contextlib import closing
from pathlib import Path

from msgspec import UNSET

from squall.errors import Interrupted, NotFinite, ProcessLost, SquallError, TaskError
from squall.evaluation_callback import EvaluationCallback
from squall.launchers.local import LocalRun
from squall.protocol.effects import End
from squall.record.rows import RecordError
from squall.record.settling import settle
from squall.report import ProgressViewer, Reader, Viewer, Viewers, prepare_report
from squall.report.tensorboard import TensorBoardViewer, write_record
from squall.report.words import clock, plural
from squall.run import Run
from squall.runtime.answers import described
from squall.runtime.interrupts import collected_interrupts
from squall.runtime.snapshot import Snapshots
from squall.settings import Settings
from squall.usercode.kept import load_sources

POLL_S = 0.1
PREPARE_REPORT_AFTER_S = 5.0  # in a short run it would only take time from the training


def attend(
    local: LocalRun, path: Path, snapshot: int | None, lock: int, settings: Settings, watch: EvaluationCallback
) -> None:  # fmt: skip
    """Launch the run's processes and stay until they have ended; raises what ended them, if that was not their work.

    `snapshot` is the number of the one to go on from, `lock` the descriptor of the directory's lock.
    """
    try:
        try:
            local.launch(path, snapshot, lock)
            end = _attend(local, path, viewers(settings, path, local), watch)
        finally:  # before anything is said: what there is to go on with is what it has written by then
            with collected_interrupts():  # one more Ctrl-C does not hide how the run has ended
                local.close()  # no process of the run lives on while its report is drawn
    except (ProcessLost, TaskError) as error:
        if not begun(path):
            raise
        if isinstance(error, TaskError):
            raise TaskError(f"{error}\n\n{mended(path)}", error.failure) from None
        raise ProcessLost(f"{error}\n{_remedy(path)}") from None
    except KeyboardInterrupt:
        raise _interrupted("interrupted at once", path) from None
    raise_for(end, path, watch)


def viewers(settings: Settings, path: Path, local: LocalRun) -> list[Viewer]:
    """Everything that shows the run while it goes on."""
    found: list[Viewer] = [ProgressViewer(causes=local.standing_still)] if settings.progress else []
    return [*found, TensorBoardViewer(path)] if settings.tensorboard else found


def _attend(local: LocalRun, path: Path, wanted: list[Viewer], watch: EvaluationCallback) -> End:
    with collected_interrupts(requests=2) as interrupts, closing(Viewers(path / "run.sqlite", wanted)) as shown:
        heeded = 0
        prepare_at = time.monotonic() + PREPARE_REPORT_AFTER_S
        while local.ended is None:
            local.attend(POLL_S, watch)
            if not path.is_dir():
                raise SquallError(f"{path} was removed while the run went on: nothing can be saved, and it is ended")
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


def _remedy(path: Path, command: str = "squall resume {path}") -> str:
    if (prediction := described(path)) is not None:
        return f"what is answered is kept; {prediction['again']}"
    number = Snapshots(path).numbers()
    where = f"from snapshot {number[-1]}" if number else "from the beginning (no snapshot was written yet)"
    unsaved = _unsaved(path, number[-1]) if number else ""
    return f"{unsaved}go on {where} with: {command.format(path=str(path))}"


def _unsaved(path: Path, snapshot: int) -> str:
    """What was trained since, in words."""
    try:
        with closing(Reader(path / "run.sqlite")) as reader:
            work = reader.progress()  # a row a replica
        manifest = Snapshots(path).manifest(snapshot)
    except (RecordError, SquallError):
        return ""  # a resume says what is wrong
    seconds = max((each.time_s for each in work), default=0.0) - manifest.trained_s
    if seconds < 0.05:
        return ""
    lost = sum(each.examples for each in work) - min(manifest.examples) if manifest.examples is not UNSET else 0
    examples = f" ({plural(lost, 'example')})" if lost > 0 else ""
    return f"the last {clock(seconds)} of training{examples} are not saved; "


def _interrupted(reason: str, path: Path) -> Interrupted:
    return Interrupted(f"{reason}; {_remedy(path)}" if begun(path) else reason)


def mended(path: Path) -> str:
    """The remedy where the user's own code has failed."""
    if described(path) is not None:
        return f"mend it: {_remedy(path)}"
    file = load_sources(path).file
    if file:
        return f"mend it, and {_remedy(path)} (which reads {file} again)"
    return f"mend it, and {_remedy(path, 'squall.resume({path!r}, task=...)')}, with the mended function"


def begun(path: Path) -> bool:
    """Whether the run has a record: there is something to go on with, or to look at."""
    return (path / "run.sqlite").exists()


def raise_for(end: End, path: Path, watch: EvaluationCallback) -> None:
    """Raise the exception of a run that has not ended well: first of all the user's own."""
    if watch.error is not None:
        watch.error.add_note(_remedy(path, "squall.resume({path!r}, on_evaluation=...)"))
        raise watch.error
    if end.status == "interrupted":
        raise _interrupted(end.reason, path)
    if end.status == "nonfinite":
        raise NotFinite(f"{end.reason}. Last good weights: {path / 'snapshots'}")
    if end.status == "failed":
        raise SquallError(f"{end.reason}\n{_remedy(path)}")
