"""`squall live`: a page that shows a run."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add(commands: Any, arguments: Sequence[str]) -> None:
    parser = commands.add_parser("live", help="show a run on a page, while it goes on or afterwards")
    parser.set_defaults(run=_live)
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument(
        "--port", type=int, default=7780, help="on 127.0.0.1, or the next one that is free (default: 7780)"
    )
    parser.add_argument("--of", type=int, metavar="PID", help=argparse.SUPPRESS)  # ends with this process


def _live(options: argparse.Namespace, local: object, commanded_at: float) -> tuple[int, str]:
    from squall.live.server import bound, link, new_token, serve
    from squall.runtime.processes import die_with_parent

    if options.of is not None:
        die_with_parent(options.of)

    path = Path(options.run_dir)
    if not path.is_dir():
        raise ValueError(f"no run at {path}: give the folder of a run, such as runs/<name>")
    token, listener = new_token(), bound(options.port)
    about = "to end it: Ctrl-C" if options.of is None else f"afterwards: squall live {path}"
    sys.stdout.write(f"{link(listener, token)}  shows the run; {about}\n")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        serve(path, listener, token)
    return 0, ""
