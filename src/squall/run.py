"""A run's directory, seen from outside: what it was told to do, what came of it, and the trained model."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import NotRequired, TypedDict, TypeVar, final

import msgspec
from torch import nn

from squall.errors import SquallError
from squall.plan import Plan, Settings, versions
from squall.report import History, Reader, Summary, history, summarize, write_report
from squall.runtime import best
from squall.runtime.disk import written
from squall.runtime.seeds import chance_kept, seed_everything
from squall.runtime.snapshot import Snapshots
from squall.strategies import Strategy
from squall.task import Task
from squall.usercode.shipping import pack, unpack, unpack_sources
from squall.usercode.sources import Sources
from squall.vector import Layout

TaskFunction = Callable[[], Task]
T = TypeVar("T")


@final
class Code(TypedDict):
    """The user's own functions and settings, as `code.pickle` keeps them for `resume`."""

    task: TaskFunction
    strategy: Strategy
    settings: Settings
    plan: Plan
    file: NotRequired[str]  # FILE:function, where the task was read from one
    shipped: NotRequired[dict[str, str]]  # file -> text, where the task is one that was kept


@final
class ScriptCode(TypedDict):
    """A script's run, as `code.pickle` keeps it."""

    script: Path
    text: str  # of the script
    arguments: list[str]
    strategy: Strategy
    settings: Settings
    plan: Plan
    optimizer_chosen: bool  # the strategy's optimizer counts, and not the script's


class Run:
    """A finished run, or any run's directory opened again."""

    def __init__(self, directory: str | Path, task: TaskFunction | None = None) -> None:
        self.directory = Path(directory)
        self._task = task
        self._model: nn.Module | None = None
        self._best: nn.Module | None = None

    def summary(self) -> Summary:
        """What was reached, how fast, and how stale; `str()` is a table, `to_json_dict()` is for programs."""
        reader = Reader(self.directory / "run.sqlite")
        try:
            return summarize(reader)
        finally:
            reader.close()

    @property
    def history(self) -> History:
        """`evaluations` and `progress`, each a dict of columns: `pandas.DataFrame(run.history.evaluations)`."""
        reader = Reader(self.directory / "run.sqlite")
        try:
            return history(reader)
        finally:
            reader.close()

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f"<p>{escape(str(self.directory))}</p>{self.summary()._repr_html_()}"

    @property
    @chance_kept()
    def model(self) -> nn.Module:
        """The trained model, on the CPU, in evaluation mode. Raises `SquallError` where there is no snapshot."""
        if self._model is None:
            numbers = Snapshots(self.directory).numbers()
            if not numbers:
                raise SquallError(f"{self.directory} has no snapshot: nothing was trained yet")
            task, layout = self._built()
            vector = Snapshots(self.directory).restore(numbers[-1], layout).tensors["weights"]
            layout.read_model(vector, task.model)
            self._model = task.model.eval()
        return self._model

    @property
    @chance_kept()
    def best(self) -> nn.Module:
        """The model of the evaluation that was best in the metric of `keep_best`, as `model` has the last.

        Raises `SquallError` where none was kept.
        """
        if self._best is None:
            task, layout = self._built()
            vector = best.weights(self.directory, layout)
            if vector is None:
                raise SquallError(f"{self.directory} keeps no best weights: train with keep_best, such as 'accuracy'")
            layout.read_model(vector, task.model)
            self._best = task.model.eval()
        return self._best

    def _built(self) -> tuple[Task, Layout]:
        plan = msgspec.json.decode((self.directory / "run.json").read_bytes())["plan"]
        seed_everything(plan["seed"])
        task = self._task_function()()
        return task, Layout.of(task.model, [group["params"] for group in task.param_groups()])

    def _task_function(self) -> TaskFunction:
        if self._task is not None:
            return self._task
        code = load_code(self.directory)
        if "script" in code:
            raise SquallError(f"{self.directory} is a script's run: its model is made by {code['script']}")
        return code["task"]

    def report(self) -> Path:
        """Write report.html anew and say where it lies."""
        return write_report(self.directory)


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


def write_plan(path: Path, code: Code | ScriptCode, shipped: bytes | None = None) -> None:
    """run.json for people and reports; code.pickle (private), which is `code` shipped, for `resume`."""
    document = {"name": path.name, "plan": code["plan"], "versions": versions()}
    if "script" in code:
        document["script"] = str(code["script"])
    _replace(path / "run.json", msgspec.json.format(msgspec.json.encode(document)))
    _replace(path / "code.pickle", shipped if shipped is not None else pack(code))


def _replace(path: Path, data: bytes) -> None:
    """Write a private file whole or not at all: a resumed run must not lose what it is resumed from."""
    beside = path.with_name(path.name + ".new")
    with written(path):
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        os.replace(beside, path)


def load_code(path: Path, task: TaskFunction | None = None) -> Code | ScriptCode:
    """What a run was started with; `task` instead of the stored one, which is then not even looked at.

    Raises `ValueError` for a directory that holds no run. Reads a pickle: only of directories you trust.
    """
    code: Code | ScriptCode = _read(path, lambda data: unpack(data, task))
    return code


def load_sources(path: Path) -> Sources:
    """The user's files as they were when the run was last started. Raises `ValueError` as `load_code` does."""
    return _read(path, unpack_sources)


def _read(path: Path, read: Callable[[bytes], T]) -> T:
    try:
        return read((path / "code.pickle").read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} holds no run that can be resumed or replayed: it has no code.pickle") from None
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path / 'code.pickle'} needs the module {error.name!r}, which is not found here: put its folder into"
            " PYTHONPATH, or install it"
        ) from error
    except Exception as error:
        raise ValueError(
            f"{path / 'code.pickle'} cannot be read ({type(error).__name__}: {error}): start a new run, or give the"
            " task anew (`squall resume --task FILE:function`, `squall.resume(task=...)`)"
        ) from error
