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

from squall.cli.machines import replicas
from squall.runtime.run_plan import Aims
from squall.settings import Settings
from squall.strategies import STRATEGIES, Strategy
from squall.task import OptimizerFactory

DEFAULT_STRATEGY = "downpour"


def add_strategy_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Add --strategy and every strategy's flags; the help shows those of the strategy that the arguments name.

    The others are read as well: the file may have settings of its own for any of them, and `build_strategy` says of a
    flag that does not fit whose it is.
    """
    chosen = _named(arguments)
    title = f"strategy {chosen}" if chosen else "strategy; its flags are shown by --strategy NAME --help"
    group = parser.add_argument_group(title)
    group.add_argument(
        "--strategy", choices=sorted(STRATEGIES), metavar="NAME",
        help=f"one of {', '.join(STRATEGIES)} (default: the file's, or {DEFAULT_STRATEGY})",
    )  # fmt: skip
    shown = [field.name for field in dataclasses.fields(STRATEGIES[chosen])] if chosen else ["replicas", "shards"]
    added = {"optimizer"}
    for kind in sorted(STRATEGIES.values(), key=lambda kind: kind is not STRATEGIES.get(chosen or DEFAULT_STRATEGY)):
        for field in dataclasses.fields(kind):
            if field.name not in added:
                added.add(field.name)
                _add_flag(group, kind, field, field.name in shown)
    add_optimizer_flags(parser)


def add_optimizer_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer, of the shards or, where replicas have their own, of those")
    group.add_argument("--optimizer", metavar="NAME", help="a torch.optim class, such as sgd, adagrad or adamw")
    group.add_argument("--lr", type=float, help="its learning rate")
    group.add_argument("--momentum", type=float, help="its momentum, where it has one")
    group.add_argument("--weight-decay", type=float, metavar="DECAY", help="its weight decay")


def _named(arguments: Sequence[str]) -> str | None:
    early = argparse.ArgumentParser(add_help=False)
    early.add_argument("--strategy", nargs="?")
    name = early.parse_known_args(arguments)[0].strategy
    return name if name in STRATEGIES else None


def _add_flag(group: Any, kind: type[Strategy], field: dataclasses.Field[Any], shown: bool) -> None:
    described = _descriptions(kind).get(field.name, "")
    default = "none" if field.default is None else field.default
    text = f"{described.rstrip('.')} (default: {default})".replace("%", "%%") if shown else argparse.SUPPRESS
    flag = "--" + field.name.replace("_", "-")
    declared = typing.get_type_hints(kind)[field.name]
    if typing.get_origin(declared) is typing.Literal:
        group.add_argument(flag, choices=typing.get_args(declared), help=text)
    elif declared is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    else:
        parse = replicas if field.name == "replicas" else _parse(declared)
        group.add_argument(flag, type=parse, metavar=field.name.upper(), help=text)


def _parse(declared: Any) -> Any:
    """A function that reads a text as a value of the declared type: `int | None`, or `int | Literal["full"]`."""
    parts = typing.get_args(declared) or (declared,)
    plain = next(t for t in parts if t is not type(None) and typing.get_origin(t) is not typing.Literal)
    words = [word for t in parts if typing.get_origin(t) is typing.Literal for word in typing.get_args(t)]

    def read(text: str) -> Any:
        return text if text in words else plain(text)

    read.__name__ = plain.__name__  # argparse names it when it refuses a text
    return read


def _descriptions(kind: type[Strategy]) -> dict[str, str]:
    """Field name -> its description in the "Args:" section of the class's docstring."""
    text = inspect.getdoc(kind) or ""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    entries = re.findall(
        r"^    (\w+): (.*?)(?=^    \w+: |\Z)", section.group(1) if section else "", re.DOTALL | re.MULTILINE
    )
    return {name: " ".join(words.split()) for name, words in entries}


def build_strategy(options: argparse.Namespace, from_file: Sequence[Strategy]) -> Strategy:
    """The named strategy, or the file's first, with the flags put in. Raises `ValueError` for flags it lacks.

    Where the file has settings for the named strategy they are taken; else the optimizer of its first.
    """
    if isinstance(options.replicas, tuple):
        raise ValueError("replicas as a range are for squall train: give a number here")
    base: Any = _chosen(options.strategy, from_file)
    changes: dict[str, Any] = {}
    for kind in STRATEGIES.values():
        for field in dataclasses.fields(kind):
            value = getattr(options, field.name, None)
            if value is None or field.name == "optimizer":
                continue
            if not _has(base, field.name):
                flag = "--" + field.name.replace("_", "-")
                owners = ", ".join(name for name, own in STRATEGIES.items() if _has(own, field.name))
                raise ValueError(f"{type(base).__name__} has no {flag}: leave it out, it is for --strategy {owners}")
            changes[field.name] = value
    if _has(base, "optimizer"):
        changes["optimizer"] = build_optimizer_factory(options, base.optimizer)
    elif any(getattr(options, name) is not None for name in ("optimizer", "lr", "momentum", "weight_decay")):
        raise ValueError(f"{type(base).__name__} has no optimizer to choose: leave --optimizer and its settings out")
    changed: Strategy = dataclasses.replace(base, **changes)
    return changed


def named_strategies(options: argparse.Namespace, from_file: Sequence[Strategy]) -> dict[str, Strategy]:
    """`--strategies` of `squall compare`: text -> strategy. Raises `ValueError` with the remedy."""
    found: dict[str, Strategy] = {}
    for text in options.strategies.split(","):
        name, *settings = text.strip().split(":")
        if name not in STRATEGIES:
            raise ValueError(f"--strategies has {name!r}: use {', '.join(STRATEGIES)}")
        base: Any = _chosen(name, from_file)
        shared = {n: getattr(options, n) for n in ("replicas", "shards") if getattr(options, n) is not None}
        changes = {n: value for n, value in shared.items() if _has(base, n)} | _parsed(type(base), settings)
        if _has(base, "optimizer"):
            changes["optimizer"] = build_optimizer_factory(options, base.optimizer)
        if text.strip() in found:
            raise ValueError(f"--strategies has {text.strip()} twice: leave one out, or give them other settings")
        found[text.strip()] = dataclasses.replace(base, **changes)
    return found


def _parsed(kind: type[Strategy], settings: Sequence[str]) -> dict[str, Any]:
    """["max_delay=4"] -> {"max_delay": 4}; lr, momentum and weight decay belong to the optimizer."""
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        fields = [field.name for field in dataclasses.fields(kind) if field.name != "optimizer"]
        if not equals or name not in fields:
            known = ", ".join(fields)
            raise ValueError(f"--strategies has {setting!r}: write field=value, where {kind.__name__} has {known}")
        declared = hints[name]
        try:
            if value == "none" and type(None) in typing.get_args(declared):
                values[name] = None
            elif typing.get_origin(declared) is typing.Literal:
                values[name] = {choice: choice for choice in typing.get_args(declared)}[value]
            elif declared is bool:
                values[name] = {"true": True, "false": False}[value]
            else:
                values[name] = _parse(declared)(value)
        except (KeyError, ValueError) as error:
            raise ValueError(f"--strategies has {setting!r}, whose value is no {declared}") from error
    return values


def _chosen(name: str | None, from_file: Sequence[Strategy]) -> Strategy:
    if name is None and from_file:
        return from_file[0]
    kind: Any = STRATEGIES[name or DEFAULT_STRATEGY]
    for strategy in from_file:
        if type(strategy) is kind:
            return strategy
    own: list[Any] = [strategy for strategy in from_file if _has(strategy, "optimizer")]
    chosen: Strategy = kind(optimizer=own[0].optimizer) if own and _has(kind, "optimizer") else kind()
    return chosen


def _has(strategy: Any, name: str) -> bool:
    return any(field.name == name for field in dataclasses.fields(strategy))


def build_optimizer_factory(options: argparse.Namespace, base: OptimizerFactory) -> OptimizerFactory:
    """The optimizer that the flags describe, or `base` with the flags put in."""
    given = {n: getattr(options, n) for n in ("lr", "momentum", "weight_decay") if getattr(options, n) is not None}
    if options.optimizer is None:
        _check_taken(base, given)
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
    _check_taken(kind, given)
    return partial(kind, **given)


def _check_taken(kind: Any, given: dict[str, float]) -> None:
    parameters = inspect.signature(kind).parameters
    unknown = [name for name in given if name not in parameters]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        name = getattr(getattr(kind, "func", kind), "__name__", "the optimizer")
        flags = ", ".join("--" + n.replace("_", "-") for n in unknown)
        raise ValueError(
            f"{name} takes no {', '.join(unknown)}: leave {flags} out, or name one that does by --optimizer"
        )


def settings_of(options: argparse.Namespace) -> Settings:
    """Settings that a command has no flag for are the usual ones."""
    given = {
        field.name: getattr(options, field.name) for field in dataclasses.fields(Settings) if field.name in options
    }
    return Settings(**given, progress=not (options.json or getattr(options, "quiet", False)))


def aims_of(options: argparse.Namespace, epochs: int | None = None) -> dict[str, Any]:
    """The flags that are fields of `Aims`; the file's `epochs` where none of them, nor --seconds, ends the run."""
    aims = {field.name: getattr(options, field.name) for field in dataclasses.fields(Aims) if field.name in options}
    if options.seconds is None and not any(value is not None for name, value in aims.items() if name != "keep_best"):
        aims["epochs"] = epochs
    return aims
