"""What the head wants of a nursery that waits."""

from __future__ import annotations

from multiprocessing.connection import Pipe
from typing import Any

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.orders import Orders


def test_what_was_said_to_processes_that_have_ended_is_passed_over() -> None:
    """The head may have told of a machine that joined, or a user's wish, just before it heard of their end."""
    mine, theirs = Pipe()
    head = ControlPipe(mine)
    for stray in ({"kind": "joined", "machine": 2, "cores": 1}, {"kind": "leave", "why": "enough"}):
        head.say(**stray)
    head.say(kind="place", seats=[], placing=3)
    head.say(kind="kill")
    plan: Any = None
    assert Orders(ControlPipe(theirs)).next(plan) is None
    assert head.hear() == {"kind": "placed", "ports": {}, "placing": 3}
