"""A user's script until it joins: what its run (`launchers.scripts`) and its replay (`replaying.scripts`) share."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

import squall.session.entry
from squall.runtime.seeds import seed_everything
from squall.session.backend import SessionBackend
from squall.strategies import Strategy
from squall.task import OptimizerFactory
from squall.usercode.sources import show

Join = Callable[[nn.Module, OptimizerFactory | None, dict[str, Any]], SessionBackend]


class Over(BaseException):
    """Ends the script in the process that has forked the replicas, when the run is over: only they go on with it."""


def run_file(
    path: Path, text: str, arguments: Sequence[str], seed: int, join: Join, ahead: Sequence[str] = ()
) -> ModuleType:  # fmt: skip
    """Run a script as `python path arguments` does, seeded, with `join` behind its `squall.join`.

    `text` is the script's, whatever its file holds by now. Modules are looked for in the folders `ahead`, and then
    beside it. Its own one is returned, and lives as long as that is kept.
    """
    joined = False

    def join_once(model: nn.Module, optimizer: OptimizerFactory | None, options: dict[str, Any]) -> SessionBackend:
        nonlocal joined
        if joined:
            raise RuntimeError("squall.join was called before: a script trains one model")
        joined = True
        return join(model, optimizer, options)

    before = sys.argv, sys.path, squall.session.entry.launched, sys.modules["__main__"]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = str(path)
    show({str(path): text})
    sys.argv, sys.path = [str(path), *arguments], [*ahead, str(path.resolve().parent), *sys.path]
    squall.session.entry.launched = join_once
    seed_everything(seed)
    try:
        exec(compile(text, str(path), "exec"), main.__dict__)
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            raise
    finally:
        sys.argv, sys.path, squall.session.entry.launched, sys.modules["__main__"] = before
    return main


def chosen(strategy: Strategy, optimizer: OptimizerFactory | None, optimizer_chosen: bool) -> Strategy:
    """The strategy, with the script's own optimizer unless the command has chosen one."""
    if optimizer is None or optimizer_chosen:
        return strategy
    changed: Strategy = dataclasses.replace(strategy, optimizer=optimizer)  # type: ignore[call-arg]
    return changed
