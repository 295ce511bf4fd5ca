"""What Ray starts on a node of its cluster: a machine of the run, as `squall join` is one.

Its nursery is a process of its own: that forks, so it must be free of threads, and an actor's process is full of them.
"""

from __future__ import annotations

import os
import sys

from squall.errors import SquallError
from squall.launchers.joining.address import parse_address
from squall.launchers.joining.attending import attend
from squall.launchers.joining.call import Call
from squall.launchers.joining.token import Token

WAIT_S = 600  # that a run may take from asking for its machines to letting them in


def visible_gpus() -> str:
    """Of the bundle that this runs in."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


class MachineActor:
    """A machine of the run. Ray's dashboard has its name, and in its log what the nursery and its processes write."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __repr__(self) -> str:
        """Ray puts it before each line that it shows of the log."""
        return f"machine {self._number}"

    def join(self, head: str, token: str, cores: int) -> str:
        """Take part in the run until that has ended; returns what has gone wrong, "" if nothing."""
        address = parse_address(head, "the run's address")
        call = Call(address, Token.parse(token, "the run's first machine"), WAIT_S, cores, self._number)
        try:
            end = attend(call, lambda text: sys.stderr.write(f"squall: {text}\n"))
        except SquallError as error:
            return str(error)
        return "" if end.status in ("finished", "left") else end.reason
