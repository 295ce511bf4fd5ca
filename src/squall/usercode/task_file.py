"""FILE[:function]: the task function of a user's file, and the defaults that the file sets."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from squall.strategies import Strategy
from squall.task import Task
from squall.usercode.sources import read, show


@dataclass(frozen=True)
class Loaded:
    """What a file gives: its task, and its own `strategy`, `strategies` and `epochs` where it has them."""

    function: Callable[[], Task]
    file: str  # FILE:function, absolute, by which it can be read again
    strategies: tuple[Strategy, ...]  # the file's `strategy` first, then its settings for others
    epochs: int | None
    predict: Callable[..., Any] | None = None  # its function of a model and a batch, for `squall predict`


def load_task(text: str, default: str = "task") -> Loaded:
    """`default` is the function that is taken where none is named, if the file has it; else it is `task`.

    Raises `ValueError` for a file or function that is not there; the file's own exceptions pass through.
    """
    name, _, function_name = text.partition(":")
    path = Path(name).resolve()
    if not path.is_file():
        raise ValueError(f"{name} is no file: give a Python file, or FILE:function")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    source = read(str(path))
    if spec is None or source is None:
        raise ValueError(f"{name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))  # the file's own imports, as `python FILE` would find them
    show({str(path): source})  # what is shown, kept and run is one text, though the file may be edited meanwhile
    exec(compile(source, str(path), "exec"), module.__dict__)
    cloudpickle.register_pickle_by_value(module)  # no other process can import it by name
    function_name = function_name or (default if hasattr(module, default) else "task")
    function = getattr(module, function_name, None)
    if function is None:
        raise ValueError(f"{name} has no function {function_name!r}: name one with {name}:function")
    if not callable(function):
        raise ValueError(f"{name}:{function_name} is not a function: it must build and return a squall.Task")
    own = [getattr(module, "strategy", None), *getattr(module, "strategies", ())]
    epochs = getattr(module, "epochs", None)
    return Loaded(
        function,
        f"{path}:{function_name}",
        tuple(strategy for strategy in own if isinstance(strategy, Strategy)),
        epochs if isinstance(epochs, int) else None,
        predict if callable(predict := getattr(module, "predict", None)) else None,
    )
