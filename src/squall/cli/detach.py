"""`--detach`: the run goes on without this terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from squall.detaching import Command
from squall.runtime.log import LOG


def add_detach(group: Any) -> None:
    group.add_argument("--detach", action="store_true", help="go on without this terminal: squall ps, attach, stop")


def wanted(own: Sequence[str]) -> bool:
    """To be known before anything is started, or imported that has threads; `own` are no arguments of a script."""
    given = any(len(each) > len("--de") and "--detach".startswith(each) for each in own)
    return given and own[0] in ("train", "run", "resume") and not {"-h", "--help"} & set(own)


def begins(options: argparse.Namespace) -> Callable[[Path], None] | None:
    """What to call when all is well until the training."""
    if options.daemon is None:
        return None
    if options.live:
        raise ValueError("--detach leaves no terminal for the link of --live: leave that out, and use squall live RUN")
    found: Callable[[Path], None] = options.daemon.begins
    return found


def wait(command: Command, as_json: bool) -> int:
    """Up to the training; returns the exit status."""
    found = command.wait()
    if isinstance(found, int):
        return found
    if as_json:
        sys.stdout.write(json.dumps({"run_directory": str(found), "pid": command.daemon}) + "\n")
        return 0
    sys.stdout.write(
        f"{found} trains without this terminal (pid {command.daemon}); what it prints is in {found / LOG}\n"
        f"    squall attach {found}    shows its progress, and how it ends\n"
        f"    squall stop {found}      ends it, with a snapshot\n"
    )
    return 0
