"""What a run's directory keeps to go on from: the plan in `run.json`, users' code and settings in `code.pickle`.

`code.pickle` is three pickles, one behind the other, so that each can be read without what follows: the texts of the
user's files, the settings, and the task, which cannot be unpickled where its modules are not any more what they were.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NotRequired, TypedDict, final

import msgspec

from squall.plan import versions
from squall.runtime.disk import written
from squall.runtime.run_plan import Plan
from squall.settings import Settings
from squall.strategies import Strategy
from squall.task import TaskFunction
from squall.usercode.shipping import ship
from squall.usercode.sources import Sources, show_kept


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


def pack(code: Code | ScriptCode) -> bytes:
    """The bytes of `code.pickle`, with the texts of now. Raises `ValueError` as `ship` does."""
    if "script" in code:
        sources = Sources(str(code["script"]), "", {str(code["script"]): code["text"]}, {})
    else:
        sources = Sources.now(code.get("file", ""), code.get("shipped"))
    settings = {name: value for name, value in code.items() if name not in ("task", "shipped")}
    return pickle.dumps(sources) + ship(settings) + ship(code.get("task"))


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
    # What refers to Keras imports it here, and not by the user's file, which says what Keras shall compute with.
    os.environ["KERAS_BACKEND"] = "torch"
    with _opened(path) as file:
        sources: Sources = pickle.load(file)
        folder = os.path.dirname(sources.file)
        if folder and folder not in sys.path:  # its imports are found as `python FILE` finds them
            sys.path.insert(0, folder)
        code: Code | ScriptCode = pickle.load(file)
        if "script" in code:
            return code
        if task is not None:
            return {**code, "task": task}
        show_kept(sources.shipped)
        return {**code, "task": pickle.load(file), "shipped": sources.shipped}


def load_sources(path: Path) -> Sources:
    """The user's files as they were when the run was last started. Raises `ValueError` as `load_code` does."""
    with _opened(path) as file:
        sources: Sources = pickle.load(file)
        return sources


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """`code.pickle` of a run's directory; what fails while it is read is a `ValueError`."""
    try:
        with open(path / "code.pickle", "rb") as file:
            yield file
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
