"""The spine: check, plan, launch, run, report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from squall.attending import attend, finish, mended, raise_for
from squall.evaluation_callback import EvaluationCallback, OnEvaluation
from squall.launchers.alone import LoneRun
from squall.launchers.head_of_plan import head_of
from squall.launchers.inline import InlineRun, LoneChannel
from squall.launchers.local import LocalRun
from squall.live.beside import live_page
from squall.plan import build_checked, make_plan
from squall.report.tensorboard import OF_A_SCRIPT, begin_tensorboard
from squall.restarting import Starts
from squall.run import Run, new_directory
from squall.runtime import attempts, best
from squall.runtime.arena import SHARED_MEMORY
from squall.runtime.job import private_job
from squall.runtime.lock import hold
from squall.runtime.optimizers import state_name
from squall.runtime.run_plan import Aims
from squall.runtime.seeds import chance_kept
from squall.runtime.snapshot import Snapshots
from squall.settings import Settings, with_given
from squall.strategies import Strategy
from squall.task import Task, TaskFunction
from squall.usercode.blame import note_memory
from squall.usercode.kept import Code, ScriptCode, pack, write_plan
from squall.usercode.rereading import code_again, resumed_code
from squall.usercode.sources import Sources
from squall.vector import Layout


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
    keep_best: str | None = None,
    patience: int | None = None,
    on_evaluation: OnEvaluation | None = None,
    parts: int | None = None,
    on_nan: str | None = None,
    restarts: int | None = None,
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
        keep_best: a validation metric; the weights of the evaluation in which it was best (a loss: lowest) are kept
            for `run.best`.
        patience: end when so many evaluations in a row were not better: in the metric of `keep_best`, else that of
            `until`, else the loss. A resumed run counts anew.
        on_evaluation: called here with each evaluation while the run goes on: a dict of time_s, epoch, examples and
            updates of the weights, and of each metric. The run ends in order if it returns True; if it raises, the run
            ends with a snapshot, and the exception is raised here. A Ctrl-C waits until it returns.
        parts: processes of each replica, on which its model lies as `Task.split` says (`settings.parts` is the same).
        on_nan: "stop" (the default), "skip" or "skip:20": what becomes of a batch that gives NaN or Inf twice
            (`settings.on_nan` is the same).
        restarts: how often in a row the run starts again by itself, from its newest snapshot, when what it cannot go
            on without was lost (`settings.restarts` is the same, 3 by default; 0: never).
        run_dir: where to keep the run; a new directory under runs/ by default.
        settings: how the run is carried out: launcher, threads, intervals.

    Raises:
        ValueError: a setting or the task is wrong; nothing was launched.
        SquallError: the run ended with an error (see `squall.errors`).
        Interrupted: Ctrl-C or SIGTERM; there is a snapshot, and nothing is left running.
    """
    settings = with_given(settings, seconds=seconds, parts=parts, on_nan=on_nan, restarts=restarts)
    aims = Aims(epochs=epochs, steps=steps, until=until, keep_best=keep_best, patience=patience)
    plan = make_plan(strategy, settings, aims, seed=seed, device=device)
    code = Code(task=task, strategy=strategy, settings=settings, plan=plan)
    return Launch(code, watch=EvaluationCallback(on_evaluation)).go(run_dir)


def resume(
    run_dir: str | Path, *, task: TaskFunction | None = None, as_it_was: bool = False,
    strategy: Strategy | None = None, restarts: int | None = None, settings: Settings | None = None,
    on_evaluation: OnEvaluation | None = None, **limits: Any,
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
        restarts: as of `fit`.
        settings: instead of the run's own.
        on_evaluation: as of `fit`.
        limits: replace those of the plan: epochs, steps, until, keep_best, patience.

    Raises:
        TypeError: there is no such limit.
        ValueError: the directory holds no run that can be resumed.
        SnapshotMismatch: the task builds another model now, or the optimizer or the training set is another one.
    """
    known = [field.name for field in dataclasses.fields(Aims)]
    for name in limits:
        if name not in known:
            raise TypeError(f"resume() has no argument {name!r}: its limits are {', '.join(known)}")
    path = Path(run_dir)
    old = code_again(path, task, as_it_was)
    if "script" in old:
        raise ValueError(f"{run_dir} is the run of a script: go on with it by `squall resume {run_dir}`")
    settings = with_given(settings or old["settings"], restarts=restarts)
    code = resumed_code(old, strategy, settings, **limits)
    return Launch(code, watch=EvaluationCallback(on_evaluation)).go(path, again=True)


class Launch:
    """One start of a run, of a task or of a script.

    The command line makes it early, so that the nursery imports torch meanwhile.
    """

    def __init__(
        self, code: Code | ScriptCode, local: LocalRun | None = None, commanded_at: float | None = None,
        watch: EvaluationCallback | None = None, begins: Callable[[Path], None] | None = None, by_itself: bool = False,
    ) -> None:  # fmt: skip
        """`local` is the nursery, if it was started early; `commanded_at` is in seconds since 1970.

        `begins` is called with the run's directory, and more than once, when all is well until the training; what the
        run's processes print goes into a file there, then. `by_itself`: the run goes on without anybody's command.
        """
        self.code = code
        self.plan = code["plan"]
        self._strategy = code["strategy"]
        self._commanded_at = commanded_at or time.time()
        here = self._strategy.recipe().alone or self.plan.settings.launcher == "inline"
        if here and local is not None:
            local.close()
        self._watch = watch or EvaluationCallback()
        self._begins, self._by_itself = begins, by_itself
        self._head = None if here else head_of(self.plan, self._strategy.recipe())
        self._local = None if here else local or LocalRun(self.plan.settings.parts > 1)
        self._told: tuple[dict[str, Any], dict[str, Any]] = {}, {}  # what nurseries are given

    @chance_kept()
    def go(self, directory: str | Path | None, again: bool = False) -> Run:
        """Train in `directory` (None: a new one under runs/), or go on `again` with the run that it holds."""
        code = self.code
        try:
            if self._local is not None:
                self._told = self._messages()
                self._local.prepare(*self._told, self._head)
            # The task of a script is checked where it joins.
            built = None if "script" in code else build_checked(code["task"], self.plan, self._strategy)
            shipped = pack(code)
            path = Path(directory) if again and directory is not None else new_directory(directory)
            with hold(path) as lock, live_page(path) if self.plan.settings.live else nullcontext():
                snapshot = self._last_snapshot(path, built) if again else None
                run = Run(path, None if "script" in code else code["task"])
                try:
                    write_plan(path, code, shipped)
                    if self.plan.settings.tensorboard:
                        begin_tensorboard(path, built[0] if built is not None else OF_A_SCRIPT)
                    if self._local is None:
                        assert built is not None
                        self._run_here(*built, path, snapshot)
                    else:
                        del built  # the run's processes share another: they may have the memory of this one
                        starts = Starts(path, lock, self._local, self._another, self.plan.settings.restarts)
                        attend(starts, snapshot, self.plan.settings, self._watch, self._begun)
                finally:
                    finish(run, again, self._local is None and self.plan.settings.tensorboard)
                return run
        finally:
            if self._local is not None:
                self._local.close()

    def _begun(self, path: Path) -> None:
        if self._begins is not None:
            self._begins(path)

    def _another(self) -> LocalRun:
        """A nursery in the place of one that was lost, with all its processes."""
        self._local = LocalRun(self.plan.settings.parts > 1, again=True)
        task, rest = self._told
        self._local.prepare(task, {**rest, "commanded_at": time.time()})
        return self._local

    def _messages(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """For the nursery: what is shipped by value, and the rest."""
        code = self.code
        rest = {
            "plan": self.plan, "commanded_at": self._commanded_at, "shared_memory": str(SHARED_MEMORY),
            "logged": self._begins is not None, "by_itself": self._by_itself,
        }  # fmt: skip
        if "script" in code:
            own = {name: code[name] for name in ("script", "text", "arguments", "optimizer_chosen")}
            return {"strategy": self._strategy}, {**rest, **own}
        sources = Sources.now(code.get("file", ""), code.get("shipped"))
        return {"task": code["task"], "strategy": self._strategy}, {**rest, "sources": sources}

    def _last_snapshot(self, path: Path, built: tuple[Task, Layout] | None) -> int | None:
        """The snapshot to go on from; None starts from the beginning, because the run died before its first."""
        snapshots = Snapshots(path)
        number = snapshots.newest()
        if number is not None and built is not None:
            task, layout = built
            manifest = snapshots.check(number, layout)
            manifest.check_optimizer(state_name(self._strategy.recipe()))
            manifest.check_examples(task.examples)
            if self.plan.goal.keep:
                best.weights(path, layout)  # raises if they are damaged: nobody could say later what was best
        return number

    def _run_here(self, task: Task, layout: Layout, path: Path, snapshot: int | None) -> None:
        restored = Snapshots(path).restore(snapshot, layout) if snapshot is not None else None
        job = private_job(self.plan, self._strategy, task, layout, path, restored)
        job = attempts.begin(replace(job, commanded_at=self._commanded_at, by_itself=self._by_itself))
        threads = torch.get_num_threads()
        torch.set_num_threads(self.plan.threads)
        try:
            run: LoneRun | InlineRun
            run = LoneRun(job, LoneChannel(self._watch)) if job.recipe.alone else InlineRun(job, watch=self._watch)
            self._begun(path)
            end = run.run()
        except Exception as error:
            note_memory(error)
            error.add_note(mended(path))
            raise
        finally:
            torch.set_num_threads(threads)
        raise_for(end, path, self._watch)
