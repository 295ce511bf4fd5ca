"""`squall plan`: what it is asked, and what it prints."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from squall.cli.output import check_output, out_path

if TYPE_CHECKING:
    from squall.sim.planning.ranking import Ranking
    from squall.strategies import Strategy
    from squall.usercode.task_file import Loaded

_ABOUT = (
    "Simulate strategies with many settings and numbers of processes on a modelled cluster, and rank them: by useful"
    " examples a second, or with --until by the time to a target. docs/planning.md says how."
)


def add(commands: Any, arguments: Sequence[str]) -> None:
    parser = commands.add_parser("plan", help="rank strategies on a modelled cluster", description=_ABOUT)
    parser.set_defaults(run=_plan)
    parser.add_argument("file", metavar="FILE[:function]", help="as of `squall train`")
    parser.add_argument("--cluster", required=True, metavar="PATH", help="a cluster.toml, as of `squall measure`")
    parser.add_argument("--budget", type=int, metavar="N", help="replicas and shards at once (default: its cores)")
    parser.add_argument(
        "--strategies", metavar="NAME[:field=value...],...",
        help="only these; a name without settings stands for several (default: the usual ones)",
    )  # fmt: skip
    parser.add_argument("--until", metavar="METRIC=VALUE", help="rank by time to a target, such as accuracy=0.97")
    parser.add_argument("--seconds", type=float, help="virtual time that a trial for the target may take")
    parser.add_argument("--trials", type=int, default=8, help="settings that are tried for the target (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of all chance (default: 0)")
    parser.add_argument("--keep", metavar="DIR", help="a new directory to keep the trials' runs in")
    parser.add_argument(
        "--out", "--output", metavar="PATH",
        help="a directory for plan.svg (the picture) and plan.html (the picture and the table), or a file NAME.svg with"
        " NAME.html beside it (default: the cluster file's directory)",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="write over an older output")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")


def _plan(options: argparse.Namespace, local: object, commanded_at: float) -> tuple[int, str]:
    path = out_path(options.out, "plan.svg", options.cluster)
    check_output(path, options.force, beside=[path.with_suffix(".html")], example="plan.svg")
    from squall.sim.cluster.model import Cluster
    from squall.sim.planning.page import text, write_picture
    from squall.sim.planning.planner import plan_cluster
    from squall.usercode.task_file import load_task

    if not Path(options.cluster).is_file():
        raise ValueError(f"--cluster {options.cluster} is no file: write one with `squall measure {options.file}`")
    cluster = Cluster.load(options.cluster)
    loaded = load_task(options.file)
    ranking = plan_cluster(
        loaded.function, cluster, budget=options.budget,
        strategies=None if options.strategies is None else _strategies(options.strategies, loaded.strategies),
        from_file=loaded.strategies, until=options.until, seconds=options.seconds, trials=options.trials,
        seed=options.seed, keep=options.keep, progress=sys.stderr.isatty() and not options.json,
    )  # fmt: skip
    page = write_picture(ranking, path)
    status = 130 if ranking.interrupted else 0
    if options.json:
        return status, json.dumps({**ranking.to_json_dict(), "picture": str(path), "page": str(page)}) + "\n"
    notes = {"picture": str(path), "page": str(page), "to train": _train(options.file, ranking, loaded)}
    return status, f"{text(ranking)}\n\n" + "".join(f" {name:<9} {value}\n" for name, value in notes.items())


def _strategies(text: str, from_file: Sequence[Strategy]) -> dict[str, Strategy]:
    """The named strategies: one without settings is tried with several, one with settings as it is."""
    from squall.cli.strategies import named_strategies
    from squall.sim.planning.candidates import LEFT_OUT, default_strategies

    found: dict[str, Strategy] = {}
    for part in text.split(","):
        name, _, settings = part.strip().partition(":")
        if name in LEFT_OUT:
            raise ValueError(f"--strategies has {name}, which {LEFT_OUT[name]}")
        if {"replicas", "shards"} & {setting.partition("=")[0] for setting in settings.split(":")}:
            raise ValueError(f"--strategies has {part.strip()!r}: replicas and shards are swept, use --budget")
        if settings:
            flags = dict.fromkeys(("replicas", "shards", "optimizer", "lr", "momentum", "weight_decay"))
            found |= named_strategies(argparse.Namespace(strategies=part, **flags), from_file)
        else:
            found |= default_strategies(from_file, [name])
    return found


def _train(file: str, ranking: Ranking, loaded: Loaded) -> str:
    """The command that trains with the strategy that was ranked first."""
    first = ranking.first.candidate
    flags = [f"squall train {file} --strategy {first.family}"]
    own: Any = next((s for s in loaded.strategies if type(s) is type(first.strategy)), type(first.strategy)())
    for field in dataclasses.fields(own):
        value = getattr(first.strategy, field.name)
        sized = field.name in ("replicas", "shards")
        if field.name != "optimizer" and value is not None and (sized or value != getattr(own, field.name)):
            flag = field.name.replace("_", "-")
            flags.append(
                f"--{'no-' if value is False else ''}{flag}" + ("" if isinstance(value, bool) else f" {value}")
            )
    if ranking.target is not None:
        flags.append(f"--until {ranking.target[0]}={ranking.target[1]:g}")
    return " ".join(flags)
