"""`squall ps`: the runs that go on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add(commands: Any, arguments: Sequence[str]) -> None:
    parser = commands.add_parser("ps", help="list the runs that go on")
    parser.set_defaults(run=_ps)
    parser.add_argument(
        "directory", metavar="DIR", nargs="?",
        help="the runs in this directory (default: all of yours on this machine; with --all: those in runs/, too)",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="also the runs that are over")
    parser.add_argument("--json", action="store_true", help="print one JSON list")


def _ps(options: argparse.Namespace, local: object, commanded_at: float) -> tuple[int, str]:
    from squall.report.runs import listed, table

    directory = Path(options.directory) if options.directory is not None else None
    if directory is not None and not directory.is_dir():
        raise ValueError(f"there is no directory {directory}: give one that holds runs, such as runs")
    found = listed(directory, options.all)
    return 0, json.dumps([each._asdict() for each in found]) + "\n" if options.json else table(found)
