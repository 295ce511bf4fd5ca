"""`squall token`: a secret for a run that several machines begin together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def add(commands: Any, arguments: Sequence[str]) -> None:
    token = commands.add_parser(
        "token", help="print a new token, for machines that begin a run together",
        description="Print a new token. Put it into the environment variable SQUALL_TOKEN of all machines that begin a"
        " run together (--machines auto). Who has it may run code on them.",
    )  # fmt: skip
    token.set_defaults(run=_token, json=False)


def _token(options: argparse.Namespace, local: object, commanded_at: float) -> tuple[int, str]:
    from squall.launchers.joining.token import Token

    return 0, f"{Token.for_all().text()}\n"
