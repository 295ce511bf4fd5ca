"""Flags made from dataclasses: a strategy's fields are its flags, its docstring is their help."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import typing
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from squall.plan import Settings
from squall.strategies import STRATEGIES, Strategy
from squall.task import OptimizerFactory

DEFAULT_STRATEGY = "downpour"


def add_strategy_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Add --strategy and the flags of the strategy that the arguments name (of all, where they name none)."""
    names = ", ".join(STRATEGIES)
    parser.add_argument(
        "--strategy",
        choices=sorted(STRATEGIES),
        help=f"one of {names} (default: the file's own, else {DEFAULT_STRATEGY})",
    )
    chosen = _named(arguments)
    added: set[str] = set()
    for name, kind in STRATEGIES.items():
        if chosen is not None and name != chosen:
            continue
        group = parser.add_argument_group(f"{name} (squall.{kind.__name__})")
        for field in dataclasses.fields(kind):
            if field.name not in added and field.name != "optimizer":
                added.add(field.name)
                _add_flag(group, kind, field)
    group = parser.add_argument_group("optimizer, run on the shards")
    group.add_argument("--optimizer", help="a torch.optim class by name, such as sgd, adagrad or adamw")
    group.add_argument("--lr", type=float, help="its learning rate")
    group.add_argument("--momentum", type=float, help="its momentum, where it has one")
    group.add_argument("--weight-decay", type=float, help="its weight decay")


def _named(arguments: Sequence[str]) -> str | None:
    for i, argument in enumerate(arguments):
        name = argument.partition("=")[2] if argument.startswith("--strategy=") else ""
        if argument == "--strategy" and i + 1 < len(arguments):
            name = arguments[i + 1]
        if name in STRATEGIES:
            return name
    return None


def _add_flag(group: Any, kind: type[Strategy], field: dataclasses.Field[Any]) -> None:
    described = _descriptions(kind).get(field.name, "")
    default = "none" if field.default is None else field.default
    text = f"{described.rstrip('.')} (default: {default})".replace("%", "%%")
    flag = "--" + field.name.replace("_", "-")
    declared = typing.get_type_hints(kind)[field.name]
    if declared is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        group.add_argument(flag, type=_parse(declared), default=None, metavar=field.name.upper(), help=text)


def _parse(declared: Any) -> Any:
    """The plain type behind `int | None` and the like."""
    plain = [t for t in typing.get_args(declared) if t is not type(None)] or [declared]
    return plain[0]


def _descriptions(kind: type[Strategy]) -> dict[str, str]:
    """Field name -> text, from the "Args:" section of the class's docstring."""
    text = inspect.getdoc(kind) or ""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    entries = re.findall(
        r"^    (\w+): (.*?)(?=^    \w+: |\Z)", section.group(1) if section else "", re.DOTALL | re.MULTILINE
    )
    return {name: " ".join(words.split()) for name, words in entries}


def build_strategy(options: argparse.Namespace, from_file: Strategy | None) -> Strategy:
    """The file's own strategy with the flags put in, or the named one. Raises `ValueError` for flags it lacks."""
    name = options.strategy
    if name is None and from_file is None:
        name = DEFAULT_STRATEGY
    base: Any = from_file
    if name is not None and type(from_file) is not STRATEGIES[name]:
        base = STRATEGIES[name]()
        if from_file is not None and _has(base, "optimizer") and _has(from_file, "optimizer"):
            base = dataclasses.replace(base, optimizer=from_file.optimizer)  # type: ignore[attr-defined]
    changes: dict[str, Any] = {}
    for kind in STRATEGIES.values():
        for field in dataclasses.fields(kind):
            value = getattr(options, field.name, None)
            if value is None or field.name == "optimizer":
                continue
            if not _has(base, field.name):
                flag = "--" + field.name.replace("_", "-")
                raise ValueError(f"{type(base).__name__} has no {flag}: leave it out or choose another --strategy")
            changes[field.name] = value
    optimizer = build_optimizer_factory(options, base.optimizer)
    changed: Strategy = dataclasses.replace(base, **changes, optimizer=optimizer)
    return changed


def _has(strategy: Any, name: str) -> bool:
    return any(field.name == name for field in dataclasses.fields(strategy))


def build_optimizer_factory(options: argparse.Namespace, base: OptimizerFactory) -> OptimizerFactory:
    """The optimizer that the flags describe, or `base` with the flags put in."""
    given = {n: getattr(options, n) for n in ("lr", "momentum", "weight_decay") if getattr(options, n) is not None}
    if options.optimizer is None:
        return partial(base, **given) if given else base
    kinds = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    kind = kinds.get(options.optimizer.lower())
    if kind is None:
        raise ValueError(
            f"--optimizer {options.optimizer} is not in torch.optim: use one of {', '.join(sorted(kinds))}"
        )
    unknown = [name for name in given if name not in inspect.signature(kind).parameters]
    if unknown:
        raise ValueError(f"torch.optim.{kind.__name__} takes no {', '.join(unknown)}: leave it out")
    return partial(kind, **given)


def settings_of(options: argparse.Namespace) -> Settings:
    return Settings(
        launcher=options.launcher,
        threads=options.threads,
        seconds=options.seconds,
        evaluate_every_s=options.evaluate_every_s,
        snapshot_every_s=options.snapshot_every_s,
        progress=not (options.quiet or options.json),
    )
