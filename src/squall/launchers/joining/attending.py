"""A machine that joins a run, as `squall join` sees it: the nursery does the work, this process has the user.

    `squall join` -> nursery    the call, "leave"; "joined" of another machine
    nursery -> `squall join`    "joined", "listening" when there may be something to keep, "told" what the user is,
                                "holds", with the lock of the run's directory, and "leads" when the run goes on from
                                this machine; last "end" or "failed"

A nursery whose `squall join` is gone takes part no longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from squall.errors import ProcessLost, SquallError, TaskError
from squall.launchers import scratch
from squall.launchers.joining.address import written
from squall.launchers.joining.call import TASK, Call
from squall.launchers.nursery_process import NurseryProcess
from squall.protocol.effects import End
from squall.record.rows import RecordError
from squall.runtime.interrupts import collected_interrupts

if TYPE_CHECKING:
    from squall.launchers.second_head import SecondHead

POLL_S = 0.1


def attend(call: Call, tell: Callable[[str], object]) -> End:
    """Take part in a run until it has ended, or this machine has left it; `tell` is given texts for the user.

    Raises `SquallError` if that fails, and `KeyboardInterrupt` at the second Ctrl-C, or before the training began here.
    """
    with (
        scratch.directory() as own,
        collected_interrupts() as interrupts,
    ):
        attending = Attending(call, own, tell)
        try:
            end = attending.run(interrupts)
        except KeyboardInterrupt:
            attending.nursery.kill()
            raise
        finally:
            attending.close()
    return end if call.directory is None or end.status == "left" else attending.completed(end, call.directory)


class Attending:
    def __init__(self, call: Call, own: Path, tell: Callable[[str], object]) -> None:
        self._call, self._own, self._tell = call, own, tell
        self.nursery = NurseryProcess()
        self._pipe = self.nursery.pipe
        self._pipe.connection.send_bytes(cloudpickle.dumps({"launcher": os.getpid(), "call": call, "own": str(own)}))
        self._machine = 0
        self._listening = self._leaving = False
        self._head: SecondHead | None = None  # when the run goes on from this machine
        self._lock: int | None = None  # of its directory, then
        self._end: End | None = None

    def run(self, interrupts: list[int]) -> End:
        while self._end is None:
            ready = wait([self._pipe.connection, *(self._head.sources if self._head is not None else ())], POLL_S)
            if self._pipe.connection in ready:
                self._hear(self._pipe.hear())
            if interrupts and (self._listening or not self._pipe.connection.poll()):
                self._interrupted()
            self._let_in()
        return self._end

    def _hear(self, said: dict[str, Any] | None) -> None:
        if said is None:
            raise ProcessLost(f"the nursery (pid {self.nursery.pid}) was lost: {self.nursery.ending()}")
        match said["kind"]:
            case "told":
                self._tell(said["text"])
            case "joined":
                self._machine = said["machine"]
                head = written(self._call.head)
                self._tell(f"this is machine {said['machine']} of the run at {head} now; Ctrl-C leaves it in order")
            case "listening":
                self._listening = True
            case "holds":
                with suppress(EOFError, OSError):  # the nursery is gone, as will be heard
                    self._lock = self._pipe.take()  # this ends the run from now on
            case "leads":
                self._lead(said)
            case "end":
                self._end = End(said["status"], said["reason"])
            case "failed":
                raise TaskError.told(said["error"]) if said["task"] else SquallError(said["error"])

    def _interrupted(self) -> None:
        if not self._listening:
            raise KeyboardInterrupt("interrupted before the training began on this machine")
        if not self._leaving:
            self._leaving = True
            self._tell("leaving the run; Ctrl-C again leaves at once")
            self._pipe.say(kind="leave")

    def _lead(self, said: dict[str, Any]) -> None:
        if self._head is not None:
            return
        try:
            from squall.launchers.second_head import SecondHead  # imports torch

            self._head = SecondHead(self._call, said, self._pipe, self._own / TASK)
        except Exception as error:  # the run goes on without
            self._tell(f"warning: no machine can join the run here: {type(error).__name__}: {error}")

    def _let_in(self) -> None:
        try:
            if self._head is not None:
                self._head.attend()
        except Exception as error:
            self._tell(f"warning: no machine can join the run here any more: {type(error).__name__}: {error}")
            self._close_head()

    def _close_head(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            head.close(self._end)

    def close(self) -> None:
        self.nursery.close()
        if self._lock is not None:  # nobody trains there any more
            os.close(self._lock)
        self._close_head()

    def completed(self, end: End, directory: Path) -> End:
        """The same, if the directory has all of the run then."""
        from squall.launchers.completing import complete

        try:
            aside = complete(self._call, directory, self._machine)
        except (SquallError, RecordError, ValueError) as error:
            without = "what it lacks is in the run's directory on the machine where it has ended: copy that one"
            self._tell(f"warning: {directory} is not completed ({error}): {without}")
            return End("incomplete", end.reason)
        self._tell(f"{directory} has all of the run now; what that replaced is in {aside}, and may be removed")
        return end
