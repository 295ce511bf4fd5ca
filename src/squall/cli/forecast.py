"""`squall simulate FILE --cluster ...`: what it is asked, and what it prints."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from squall.cli.flags import add_limits, add_snapshots

SHOWN_EVERY_S = 1.0


def add_cluster_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """The flags of a simulation of a user's task. The strategies' need torch."""
    from squall.cli.strategies import add_strategy_flags

    parser.add_argument("--cluster", metavar="FILE", help="a cluster.toml; `squall measure` writes one of this machine")
    parser.add_argument(
        "--gradients", choices=("real", "none"), default="real",
        help="compute them, for accuracy over virtual time, or only plan with their cost (default: real)",
    )  # fmt: skip
    add_strategy_flags(parser, arguments)
    add_limits(parser, time="virtual training time")
    parser.add_argument("--seed", type=int, default=0, help="of the run, and of all chance (default: 0)")
    parser.add_argument(
        "--parts", type=int, default=1, metavar="N",
        help="processes of a replica: the cluster's [parts], or the task's split is measured here (default: 1)",
    )  # fmt: skip
    spread = "a replica's parts on as many machines as possible"
    parser.add_argument("--spread-parts", action="store_true", dest="spread", help=spread)
    parser.add_argument("--slow", type=float, metavar="0.1", help="let the last replica run at a fraction of its speed")
    parser.add_argument("--evaluate-every-s", type=float, help="virtual seconds between evaluations")
    add_snapshots(parser, "virtual seconds")
    parser.add_argument("--run-dir", help="directory of the run of real gradients (default: the next under runs/)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")


def simulate_file(options: argparse.Namespace) -> tuple[int, str]:
    """Carry out the command; returns the exit status, and what belongs on stdout."""
    if options.file is None:
        raise ValueError("name the file whose task is to be simulated: squall simulate FILE --cluster cluster.toml")
    if options.cluster is None:
        raise ValueError(f"name the cluster: --cluster cluster.toml; `squall measure {options.file}` writes one")
    from squall.cli.strategies import aims_of, build_strategy, settings_of
    from squall.sim.cluster.model import Cluster
    from squall.sim.cluster.simulate import simulate
    from squall.usercode.task_file import load_task

    if options.spread and options.parts == 1:
        raise ValueError("--spread-parts is for replicas of several parts: give --parts as well, or leave it out")
    cluster = replace(Cluster.load(options.cluster), spread_parts=options.spread)
    loaded = load_task(options.file)
    found = simulate(
        loaded.function, build_strategy(options, loaded.strategies), cluster, gradients=options.gradients,
        **aims_of(options, loaded.epochs), seed=options.seed, run_dir=options.run_dir, settings=settings_of(options),
        watch=_shown(options.json),
    )  # fmt: skip
    status = {"finished": 0, "interrupted": 130}.get(found.status, 1)
    if options.json:
        return status, json.dumps(found.to_json_dict()) + "\n"
    report = f" report          {found.run_directory}/report.html\n" if found.run_directory else ""
    return status, f"{found}\n{report}"


def _shown(quiet: bool) -> Callable[[float], None]:
    """Keeps one line of a terminal up to date with the virtual time."""
    next_s = time.monotonic() + SHOWN_EVERY_S
    wanted = sys.stderr.isatty() and not quiet
    from squall.report.words import clock

    def watch(now: float) -> None:
        nonlocal next_s
        if wanted and time.monotonic() >= next_s:
            next_s = time.monotonic() + SHOWN_EVERY_S
            sys.stderr.write(f"\rsquall: virtual time {clock(now)} \r")
            sys.stderr.flush()

    return watch
