"""`squall simulate`: a file's task on a cluster; without a file, one chaotic world by its seed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from squall.cli.forecast import add_cluster_flags, simulate_file

if TYPE_CHECKING:
    from squall.sim.proof.chaos import Chaos

_ABOUT = (
    "With FILE and --cluster: train the task on a modelled cluster in virtual time, or only plan it"
    " (docs/simulation.md; `squall simulate FILE --help` has the flags). Without FILE: run chaotic world SEED"
    " (docs/design.md, Proof), with messages lost, late and doubled, processes paused and killed, and machines cut off"
    " and gone, and say whether every invariant held."
)


def add(commands: Any, arguments: Sequence[str]) -> None:
    """`commands` is what `add_subparsers` returns. Which flags there are depends on whether a file is given."""
    parser = commands.add_parser("simulate", help="rehearse a run in virtual time", description=_ABOUT)
    parser.set_defaults(run=_simulate)
    parser.add_argument("file", metavar="FILE[:function]", nargs="?", help="as of `squall train`")
    if _has_file(arguments):
        add_cluster_flags(parser, arguments)
    else:
        _add_world_flags(parser)


def _has_file(arguments: Sequence[str]) -> bool:
    """Whether a file's task is simulated. Only that has the strategies' flags, for which torch has to be imported."""
    rest = arguments[1:] if arguments[:1] == ["simulate"] else []
    cluster = any(argument.partition("=")[0] == "--cluster" for argument in rest)
    return cluster or any(argument.partition(":")[0].endswith(".py") for argument in rest)


def _add_world_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of the world (default: 0)")
    parser.add_argument("--trace", action="store_true", help="show the world step by step; faults are marked with !!")
    parser.add_argument(
        "--faults", type=_numbers, metavar="I,J,...", help="only these of the world's faults, by their numbers, or none"
    )
    for name in ("replicas", "shards", "examples", "epochs", "machines", "parts"):
        parser.add_argument(f"--{name}", type=int, help="in place of what the seed says")
    from squall.sim.proof.soak import add_kinds

    add_kinds(parser)
    parser.add_argument("--no-evaluator", dest="evaluate", action="store_false", help="without evaluations")
    parser.add_argument("--no-snapshots", action="store_true", help="without a snapshot before the end")
    parser.add_argument("--no-script", dest="scripted", action="store_false", help="without loops of users' own")
    parser.add_argument("--no-best", dest="keeps", action="store_false", help="without the best weights being kept")


def _numbers(text: str) -> list[int]:
    """'1,4', or 'none'"""
    try:
        return [] if text == "none" else [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 0,3, nor none") from None


def _simulate(options: argparse.Namespace, local: object, commanded_at: float) -> tuple[int, str]:
    if hasattr(options, "cluster"):
        return simulate_file(options)
    if options.file is not None:
        raise ValueError(f"{options.file} is no Python file: give FILE.py or FILE.py:function, and --cluster")
    from squall.sim.proof.soak import trace_of, verdict

    world = _world(options)
    found = verdict(world)
    steps = "\n".join([*trace_of(world), "", ""]) if options.trace else ""
    return (1 if found.error else 0), f"{steps}{found}\n"


def _world(options: argparse.Namespace) -> Chaos:
    from squall.sim.proof.soak import KINDS, SIZES, rebuilt

    if options.seed < 0:
        raise ValueError(f"--seed is {options.seed}: worlds are numbered from 0 on")
    changes: dict[str, Any] = {n: getattr(options, n) for n in SIZES if getattr(options, n) is not None}
    for name, value in changes.items():
        if value < 1:
            raise ValueError(f"--{name} is {value}: it must be at least 1")
    changes |= dict.fromkeys((name for name in ("evaluate", "scripted", "keeps") if not getattr(options, name)), False)
    if options.no_snapshots:
        changes["snapshot_every_s"] = None
    count = len(KINDS[options.kind](options.seed).faults)
    wrong = [number for number in options.faults or () if not 0 <= number < count]
    if wrong:
        raise ValueError(f"--faults has {wrong[0]}: world {options.seed} has {count} faults, numbered from 0 on")
    return rebuilt(options.seed, options.faults, options.kind, **changes)
