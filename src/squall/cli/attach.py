"""`squall attach`: a run that another process trains, as its own terminal would show it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add(commands: Any, arguments: Sequence[str]) -> None:
    parser = commands.add_parser(
        "attach", help="show the progress of a run that goes on elsewhere, and how it ends",
        description="Show the progress of a run that goes on elsewhere, as its own terminal would (squall train"
        " --detach has none). At its end this prints what that run has printed, and has its exit status. Ctrl-C leaves"
        " the run alone: it goes on, and `squall stop` ends it.",
    )  # fmt: skip
    parser.set_defaults(run=_attach)
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("--quiet", action="store_true", help="show no progress, and wait for the end")


def _attach(options: argparse.Namespace, local: object, commanded_at: float) -> tuple[int, str, str]:
    path = Path(options.run_dir)
    try:
        from squall.following import follow, outcome

        follow(path, quiet=options.quiet)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{path} goes on; to end it: squall stop {path}") from None
    found = outcome(path)
    from squall.cli.output import summarized
    from squall.run import Run  # which imports torch

    return (found.status, found.output, found.error) if found is not None else (*summarized(Run(path), False), "")
