"""The spine: check, plan, launch, run, report."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from squall.errors import Interrupted, NotFinite, ProcessLost, SquallError, TaskError
from squall.launchers.inline import InlineRun, LoneChannel
from squall.launchers.local import LocalRun
from squall.plan import SIMULATED, Settings, check_together, make_plan, timed
from squall.protocol.core import End
from squall.report import Progress, Reader, prepare_report
from squall.rereading import code_again
from squall.run import Code, Run, TaskFunction, load_sources, new_directory, write_plan
from squall.runtime import attempts
from squall.runtime.arena import SHARED_MEMORY
from squall.runtime.interrupts import collected_interrupts
from squall.runtime.job import private_job
from squall.runtime.lock import hold
from squall.runtime.optimizers import check_optimizers, state_name
from squall.runtime.seeds import chance_kept, seed_everything
from squall.runtime.sequential import Sequential
from squall.runtime.snapshot import Snapshots
from squall.shipping import pack
from squall.sources import Sources
from squall.strategies import Strategy
from squall.task import Task, check_task
from squall.vector import Layout
from squall.writer import settle

POLL_S = 0.1
PREPARE_REPORT_AFTER_S = 5.0  # in a short run it would only take time from the training


def fit(
    task: TaskFunction,
    strategy: Strategy,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    until: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    run_dir: str | Path | None = None,
    settings: Settings | None = None,
) -> Run:
    """Train a task with a strategy, and return the run.

    Args:
        task: function without arguments that builds a `Task`. It may be a closure or live in a notebook.
        strategy: such as `squall.Downpour(replicas=4, shards=2)`.
        epochs: end after so many passes over the training data (default 1, if no other limit is given).
        steps: end after so many batches, over all replicas.
        seconds: end after so much training time (`settings.seconds` is the same).
        until: end when a validation metric is reached, such as "accuracy=0.97" (a loss is to fall to its target).
        seed: decides initial weights, data order, dropout and augmentation.
        device: "cpu", "cuda" (replicas take the GPUs in turn) or "cuda:1".
        run_dir: where to keep the run; a new directory under runs/ by default.
        settings: how the run is carried out: launcher, threads, intervals.

    Raises:
        ValueError: a setting or the task is wrong; nothing was launched.
        SquallError: the run ended with an error (see `squall.errors`).
        Interrupted: Ctrl-C or SIGTERM; there is a snapshot, and nothing is left running.
    """
    settings = timed(settings, seconds)
    plan = make_plan(strategy, settings, epochs=epochs, steps=steps, until=until, seed=seed, device=device)
    return Launch(Code(task=task, strategy=strategy, settings=settings, plan=plan)).go(run_dir)


def resume(
    run_dir: str | Path, *, task: TaskFunction | None = None, as_it_was: bool = False,
    strategy: Strategy | None = None, settings: Settings | None = None, **limits: Any,
) -> Run:  # fmt: skip
    """Go on with a run from its last snapshot, with its own strategy or with another one (more replicas, say).

    What of the user's files has changed since the run began is said on standard error.

    Args:
        run_dir: of any run but a script's.
        task: what to train now, such as the mended function. Without it a file that was given to `squall train` is
            read again. A function that was given to `fit` goes on as it was, because the file of a program and a
            notebook cannot be read again without running them; only what it imports is imported anew.
        as_it_was: a file is not read again either; the code that was kept with the run goes on.
        strategy: instead of the run's own.
        settings: instead of the run's own.
        limits: replace those of the plan: epochs, steps, until.

    Raises:
        ValueError: the directory holds no run that can be resumed.
        SnapshotMismatch: the task builds another model now, or the optimizer or the training set is another one.
    """
    path = Path(run_dir)
    old = code_again(path, task, as_it_was)
    if "script" in old:
        raise ValueError(f"{run_dir} is the run of a script: go on with it by `squall resume {run_dir}`")
    return Launch(resumed_code(old, strategy, settings, **limits)).go(path, again=True)


def resumed_code(code: Code, strategy: Strategy | None, settings: Settings | None, **limits: Any) -> Code:
    """What `resume` will run: the run's own code, with what is to be different put in."""
    old = code["plan"]
    if old.launcher == SIMULATED:
        raise ValueError("this is a simulated run, on a cluster that is not here: simulate it anew, with other limits")
    until = f"{old.until[0]}={old.until[1]}" if old.until is not None else None
    limits = {"epochs": old.epochs, "steps": old.steps, "until": until, **limits}
    strategy, settings = strategy or code["strategy"], settings or code["settings"]
    plan = make_plan(strategy, settings, **limits, seed=old.seed, device=old.device)
    return {**code, "strategy": strategy, "settings": settings, "plan": plan}


class Launch:
    """One start of a run. The command line makes it early, so that the nursery imports torch meanwhile."""

    def __init__(self, code: Code, local: LocalRun | None = None, commanded_at: float | None = None) -> None:
        self.code = code
        self.plan = code["plan"]
        self._strategy = code["strategy"]
        self._commanded_at = commanded_at or time.time()
        here = self._strategy.in_process or self.plan.launcher == "inline"
        if here and local is not None:
            local.close()
        self._local = None if here else local or LocalRun()

    @chance_kept()
    def go(self, directory: str | Path | None, again: bool = False) -> Run:
        try:
            if self._local is not None:
                self._local.prepare({"task": self.code["task"], "strategy": self._strategy}, self._message())
            task, layout = self._checked()
            shipped = pack(self.code)
            path = Path(directory) if again and directory is not None else new_directory(directory)
            with hold(path) as lock:
                return self._start(task, layout, path, shipped, again, lock)
        finally:
            if self._local is not None:
                self._local.close()

    def _start(self, task: Task, layout: Layout, path: Path, shipped: bytes, again: bool, lock: int) -> Run:
        snapshot = _last_snapshot(path, task, layout, self._strategy) if again else None
        write_plan(path, self.code, shipped)
        return self._run(task, layout, path, snapshot, lock)

    def _checked(self) -> tuple[Task, Layout]:
        check_optimizers(self._strategy.recipe())
        seed_everything(self.plan.seed)
        task = check_task(self.code["task"]() if callable(self.code["task"]) else _not_a_function(self.code["task"]))
        return task, check_together(self.plan, self._strategy, task)

    def _run(self, task: Task, layout: Layout, path: Path, snapshot: int | None, lock: int) -> Run:
        run = Run(path, self.code["task"])
        try:
            if self._local is not None:
                self._local.launch(path, snapshot, lock)
                attend(self._local, path, self.plan.progress)
            else:
                self._run_here(task, layout, path, snapshot)
        finally:
            if self._local is not None:
                self._local.close()  # first: nothing goes on behind a report that is being drawn
            finish_report(run)
        return run

    # ------------------------------------------------------------ in processes

    def _message(self) -> dict[str, Any]:
        return {
            "plan": self.plan, "commanded_at": self._commanded_at, "shared_memory": str(SHARED_MEMORY),
            "sources": Sources.now(self.code.get("file", ""), self.code.get("shipped")),
        }  # fmt: skip

    # ------------------------------------------------------------ in this process

    def _run_here(self, task: Task, layout: Layout, path: Path, snapshot: int | None) -> None:
        restored = Snapshots(path).restore(snapshot, layout) if snapshot is not None else None
        job = private_job(self.plan, self._strategy, task, layout, path, self._commanded_at, restored)
        job = attempts.begin(job)
        threads = torch.get_num_threads()
        torch.set_num_threads(self.plan.threads)
        try:
            end = Sequential(job, LoneChannel()).run() if self._strategy.in_process else InlineRun(job).run()
        except Exception as error:
            error.add_note(_mended(path))
            raise
        finally:
            torch.set_num_threads(threads)
        _raise_for(end, path)


def attend(local: LocalRun, path: Path, progress: bool) -> None:
    """Until the run's processes have ended; raises what ended them, if that was not their work."""
    try:
        end = _attend(local, path, progress)
    except (ProcessLost, TaskError) as error:
        if not begun(path):
            raise
        if isinstance(error, TaskError):
            raise TaskError(f"{error}\n\n{_mended(path)}", error.failure) from None
        raise ProcessLost(f"{error}\n{_remedy(path)}") from None
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted at once; {_remedy(path)}") from None
    _raise_for(end, path)


def _attend(local: LocalRun, path: Path, progress: bool) -> End:
    with collected_interrupts(requests=2) as interrupts, _progress(path, progress) as show:
        heeded = 0
        prepare_at = time.monotonic() + PREPARE_REPORT_AFTER_S
        while local.ended is None:
            local.attend(POLL_S)
            show(time.monotonic())
            if time.monotonic() >= prepare_at and begun(path):
                prepare_at = math.inf
                prepare_report()
            if heeded < len(interrupts):
                heeded += 1
                local.stop()
    return local.ended


def _not_a_function(task: object) -> Task:
    raise ValueError(f"task must be a function without arguments that builds a squall.Task: it is {task!r}")


def _last_snapshot(path: Path, task: Task, layout: Layout, strategy: Strategy) -> int | None:
    """The snapshot to go on from; None starts from the beginning, because the run died before its first."""
    snapshots = Snapshots(path)
    number = snapshots.newest()
    if number is not None:
        manifest = snapshots.check(number, layout)
        manifest.check_optimizer(state_name(strategy.recipe()))
        manifest.check_examples(task.examples)
    return number


def finish_report(run: Run) -> None:
    """The last thing that a run does, however it ended; what fails here must not hide that."""
    if not begun(run.directory):
        return
    try:
        run.report()
        settle(run.directory / "run.sqlite")
    except (Exception, KeyboardInterrupt) as error:
        warnings.warn(f"the report of {run.directory} could not be written: {error}", RuntimeWarning, stacklevel=2)


def _remedy(path: Path, command: str = "squall resume {path}") -> str:
    number = Snapshots(path).numbers()
    where = f"from snapshot {number[-1]}" if number else "from the beginning (no snapshot was written yet)"
    return f"go on {where} with: {command.format(path=str(path))}"


def _mended(path: Path) -> str:
    """The remedy where the user's own code has failed."""
    file = load_sources(path).file
    if file:
        return f"mend it, and {_remedy(path)} (which reads {file} again)"
    return f"mend it, and {_remedy(path, 'squall.resume({path!r}, task=...)')}, with the mended function"


def begun(path: Path) -> bool:
    """Whether there is anything of a run that could be gone on with, or looked at."""
    return (path / "run.sqlite").exists()


def _raise_for(end: End, path: Path) -> None:
    if end.status == "interrupted" and not begun(path):
        raise Interrupted(end.reason)
    if end.status == "interrupted":
        raise Interrupted(f"{end.reason}; {_remedy(path)}")
    if end.status == "nonfinite":
        raise NotFinite(f"{end.reason}. Last good weights: {path / 'snapshots'}")
    if end.status == "failed":
        raise SquallError(f"{end.reason}\n{_remedy(path)}")


@contextmanager
def _progress(path: Path, wanted: bool) -> Iterator[Any]:
    """A function to be called often with the time; it shows progress once there is some.

    Whatever fails here (a closed pipe, which rich turns into SystemExit, or a lost terminal) only ends the display.
    """
    with ExitStack() as cleanup:
        display: list[Progress] = []
        failed: list[BaseException] = []

        def stop() -> None:
            with suppress(Exception, SystemExit):
                display[0].stop()

        def show(now: float) -> None:
            if not wanted or failed or not begun(path):
                return
            try:
                if not display:
                    reader = Reader(path / "run.sqlite")
                    cleanup.callback(reader.close)
                    display.append(Progress(reader))
                    cleanup.callback(stop)
                    display[0].start()
                display[0].update(now)
            except (Exception, SystemExit) as error:
                failed.append(error)

        yield show
