"""A machine that joins a run, as `squall join` sees it: the nursery does the work, this process has the user.

    `squall join` -> nursery    the call, "leave"
    nursery -> `squall join`    "joined", "listening" when there may be something to keep, "told" what the user is;
                                last "end" or "failed"

A nursery whose `squall join` is gone takes part no longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import cloudpickle

from squall.errors import ProcessLost, SquallError, TaskError
from squall.launchers import scratch
from squall.launchers.joining.address import written
from squall.launchers.joining.call import Call
from squall.launchers.nursery_process import NurseryProcess
from squall.protocol.effects import End
from squall.runtime.interrupts import collected_interrupts

POLL_S = 0.1


def attend(call: Call, tell: Callable[[str], object]) -> End:
    """Take part in a run until it has ended, or this machine has left it; `tell` is given texts for the user.

    Raises `SquallError` if that fails, and `KeyboardInterrupt` at the second Ctrl-C, or before the training began here.
    """
    with (
        scratch.directory() as own,
        collected_interrupts() as interrupts,
    ):
        nursery = NurseryProcess()
        try:
            nursery.pipe.connection.send_bytes(
                cloudpickle.dumps({"launcher": os.getpid(), "call": call, "own": str(own)})
            )
            return _attend(nursery, interrupts, written(call.head), tell)
        except KeyboardInterrupt:
            nursery.kill()
            raise
        finally:
            nursery.close()


def _attend(nursery: NurseryProcess, interrupts: list[int], head: str, tell: Callable[[str], object]) -> End:
    listening = leaving = False
    while True:
        if nursery.pipe.connection.poll(POLL_S):
            said = nursery.pipe.hear()
            if said is None:
                raise ProcessLost(f"the nursery (pid {nursery.pid}) was lost: {nursery.ending()}")
            match said["kind"]:
                case "told":
                    tell(said["text"])
                case "joined":
                    tell(f"this is machine {said['machine']} of the run at {head} now; Ctrl-C leaves it in order")
                case "listening":
                    listening = True
                case "end":
                    return End(said["status"], said["reason"])
                case "failed":
                    raise TaskError.told(said["error"]) if said["task"] else SquallError(said["error"])
        if interrupts and not listening and not nursery.pipe.connection.poll():
            raise KeyboardInterrupt("interrupted before the training began on this machine")
        if interrupts and listening and not leaving:
            leaving = True
            tell("leaving the run; Ctrl-C again leaves at once")
            nursery.pipe.say(kind="leave")
