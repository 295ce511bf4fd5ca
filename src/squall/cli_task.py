"""Loading FILE[:function]: the task function of a user's file, and the defaults that the file sets."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import cloudpickle

from squall.run import TaskFunction
from squall.strategies import Strategy


@dataclass(frozen=True)
class Loaded:
    """What a file gives: its task, and its own `strategy`, `strategies` and `epochs` where it has them."""

    function: TaskFunction
    strategies: tuple[Strategy, ...]  # the file's `strategy` first, then its settings for others
    epochs: int | None


def load_task(text: str) -> Loaded:
    """Raises `ValueError` for a file or function that is not there; the file's own exceptions pass through."""
    name, _, function_name = text.partition(":")
    function_name = function_name or "task"
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{name} is no file: give a Python file, or FILE:function")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))  # the file's own imports, as `python FILE` would find them
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # no other process can import it by name
    function = getattr(module, function_name, None)
    if function is None:
        raise ValueError(f"{name} has no function {function_name!r}: name one with {name}:function")
    if not callable(function):
        raise ValueError(f"{name}:{function_name} is not a function: it must build and return a squall.Task")
    own = [getattr(module, "strategy", None), *getattr(module, "strategies", ())]
    epochs = getattr(module, "epochs", None)
    return Loaded(
        function,
        tuple(strategy for strategy in own if isinstance(strategy, Strategy)),
        epochs if isinstance(epochs, int) else None,
    )
