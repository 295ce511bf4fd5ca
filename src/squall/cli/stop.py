"""`squall stop`: the orderly end of a run that another process trains."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add(commands: Any, arguments: Sequence[str]) -> None:
    parser = commands.add_parser(
        "stop", help="end a run that goes on elsewhere, with a snapshot",
        description="End a run that goes on elsewhere, as Ctrl-C in its own terminal does: with a snapshot. This waits"
        " until all of its processes are gone, and says how to go on with it.",
    )  # fmt: skip
    parser.set_defaults(run=_stop)
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("--now", action="store_true", help="kill its processes: what was not saved is lost")


def _stop(options: argparse.Namespace, local: object, commanded_at: float) -> tuple[int, str]:
    from squall.following import stop

    path = Path(options.run_dir)
    try:
        return 0, stop(path, options.now) + "\n"
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{path} is ending by itself; to kill it: squall stop --now {path}") from None
