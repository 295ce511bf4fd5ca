"""A run's directory, seen from outside: what it was told to do, what came of it, and the trained model."""

from __future__ import annotations

import datetime
from contextlib import closing, suppress
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Literal

import msgspec
from torch import nn

from squall.errors import SquallError
from squall.report import History, Reader, Summary, history, summarize, write_report
from squall.report.tensorboard import FOLDER, begin_tensorboard, write_record
from squall.runtime import best
from squall.runtime.answers import modelless
from squall.runtime.disk import written
from squall.runtime.seeds import chance_kept, seed_everything
from squall.runtime.snapshot import Snapshots
from squall.task import Task, TaskFunction
from squall.usercode.kept import load_code
from squall.vector import Layout


class Run:
    """A finished run, or any run's directory opened again."""

    def __init__(self, directory: str | Path, task: TaskFunction | None = None) -> None:
        self.directory = Path(directory)
        self._task = task

    def summary(self) -> Summary:
        """What was reached, how fast, and how stale; `str()` is a table, `to_json_dict()` is for programs."""
        with closing(Reader(self.directory / "run.sqlite")) as reader:
            return summarize(reader)

    @property
    def history(self) -> History:
        """`evaluations` and `progress`, each a dict of columns: `pandas.DataFrame(run.history.evaluations)`."""
        with closing(Reader(self.directory / "run.sqlite")) as reader:
            return history(reader)

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f"<p>{escape(str(self.directory))}</p>{self.summary()._repr_html_()}"

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, on the CPU, in evaluation mode. Raises `SquallError` where there is no snapshot."""
        return self.trained().model

    @cached_property
    def best(self) -> nn.Module:
        """The model of the evaluation that was best in the metric of `keep_best`, as `model` has the last.

        Raises `SquallError` where none was kept.
        """
        return self.trained("best").model

    @chance_kept()
    def trained(self, weights: int | Literal["best"] | None = None) -> Task:
        """The task, built anew, and its model with the weights of a snapshot (None: the newest) or the best ones.

        The model is on the CPU, in evaluation mode. Raises `SquallError` where there are no such weights.
        """
        snapshots = Snapshots(self.directory)
        numbers = snapshots.numbers()
        if why := modelless(self.directory):
            raise SquallError(why)
        if weights is None and not numbers:
            raise SquallError(f"{self.directory} has no snapshot: nothing was trained yet")
        if isinstance(weights, int) and weights not in numbers:
            kept = f"it has {', '.join(map(str, numbers))}" if numbers else "it has none yet"
            raise SquallError(f"{self.directory} has no snapshot {weights}: {kept}")
        task, layout = self._built()
        if weights == "best":
            vector = best.weights(self.directory, layout)
            if vector is None:
                raise SquallError(f"{self.directory} keeps no best weights: train with keep_best, such as 'accuracy'")
        else:
            vector = snapshots.restore(numbers[-1] if weights is None else weights, layout).tensors["weights"]
        layout.read_model(vector, task.model)
        task.model.eval()
        return task

    def _built(self) -> tuple[Task, Layout]:
        plan = msgspec.json.decode((self.directory / "run.json").read_bytes())["plan"]
        seed_everything(plan["seed"])
        if self._task is None:
            code = load_code(self.directory)
            if "script" in code:
                raise SquallError(f"{self.directory} is a script's run: its model is made by {code['script']}")
            self._task = code["task"]
        task = self._task()
        return task, Layout.of(task.model, [group["params"] for group in task.param_groups()])

    def report(self) -> Path:
        """Write report.html anew and say where it lies."""
        return write_report(self.directory)

    def tensorboard(self) -> Path:
        """Write the event files for TensorBoard anew, and say where they lie.

        The task is built for its model's graph. Raises `ValueError` where TensorBoard is not installed.
        """
        try:
            task: Task | str = self._built()[0]
        except Exception as error:  # whatever the user's function raises, or whoever looks for it
            task = f"the task cannot be built ({str(error).strip().partition(chr(10))[0]})"
        begin_tensorboard(self.directory, task)
        write_record(self.directory)
        return self.directory / FOLDER


def new_directory(wanted: str | Path | None) -> Path:
    """Make the directory of a new run: the one that was asked for, or the next of today under runs/."""
    if wanted is not None:
        path = Path(wanted)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            hint = f"`squall resume {path}` goes on with it" if (path / "code.pickle").exists() else "it is no run"
            raise ValueError(f"{path} exists already ({hint}): choose another run directory")
        with written(path):
            path.mkdir(parents=True, exist_ok=True)
        return path
    today = datetime.date.today().isoformat()
    number = 1
    while True:
        path = Path("runs") / f"{today}-{number:02d}"
        with written(path), suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
        number += 1
