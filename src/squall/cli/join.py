"""`squall join`: this machine takes part in a run of another one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from squall.launchers.joining.call import Call


def add(commands: Any, arguments: Sequence[str]) -> None:
    parser = commands.add_parser(
        "join", help="take part with this machine in a run that another one has started",
        usage="%(prog)s HOST:PORT [--token-file FILE] [flags]",
        description="Take part in a run with this machine, until the run ends. Ctrl-C leaves it in order, so that"
        " nothing is lost; the second one leaves at once.",
    )  # fmt: skip
    parser.set_defaults(run=_join, json=False)
    parser.add_argument("head", metavar="HOST:PORT", help="where the run listens, as its first machine has printed it")
    parser.add_argument(
        "--token-file", metavar="FILE",
        help="the run's token, copied from its first machine (default: what the variable SQUALL_TOKEN contains)",
    )  # fmt: skip
    parser.add_argument(
        "--complete", metavar="RUN_DIR",
        help="this was the run's first machine, and that the run's directory, which gets at the run's end what it lacks"
        " (default of --token-file: the token there, where the variable SQUALL_TOKEN is not set)",
    )  # fmt: skip
    parser.add_argument("--cores", type=int, metavar="N", help="use so many cores (default: all of this machine)")
    parser.add_argument(
        "--address", metavar="HOST", help="where the other machines reach this one (default: where it calls from)"
    )
    parser.add_argument(
        "--wait", type=float, default=60.0, metavar="SECONDS", help="until the run must have answered (default: 60)"
    )


def _join(options: argparse.Namespace, local: object, commanded_at: float) -> tuple[int, str]:
    from squall.checks import require
    from squall.launchers.joining.address import parse_address
    from squall.launchers.joining.call import Call
    from squall.launchers.joining.token import TOKEN, VARIABLE, find_token

    head = parse_address(options.head, "the address")
    require("--cores", options.cores, options.cores is None or options.cores >= 1, "at least 1")
    require("--wait", options.wait, options.wait >= 0, "0 or more seconds")
    directory, token_file = None, options.token_file
    if options.complete is not None:
        from squall.launchers.completing import directory_of

        directory = directory_of(options.complete)
        if token_file is None and VARIABLE not in os.environ:
            token_file = str(directory / TOKEN)
    token = find_token(token_file)
    return take_part(Call(head, token, options.wait, options.cores, address=options.address, directory=directory))


def take_part(call: Call) -> tuple[int, str]:
    """Join a run, to its end; returns the exit status, and what belongs on stdout."""
    from squall.launchers.joining.attending import attend

    end = attend(call, lambda text: sys.stderr.write(f"squall: {text}\n"))
    return 0 if end.status in ("finished", "left") else 1, f"{end.reason}\n"
