"""Processes forked for a measurement: each runs a function and says what came out; none outlives the measuring."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

from squall.errors import ProcessLost, TaskError
from squall.launchers.control_pipe import ControlPipe
from squall.runtime.processes import fork
from squall.usercode.blame import encode

ForkedWork = Callable[[ControlPipe], None]


@contextmanager
def forked(works: Sequence[ForkedWork]) -> Iterator[list[ControlPipe]]:
    """A process for each; the lines to them. When the block is left, however, they are gone."""
    children: list[int] = []
    lines: list[ControlPipe] = []
    try:
        for work in works:
            held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Python's hooks of a fork swallow it
            try:
                mine, theirs = Pipe()
                child = fork()
                if not child:
                    _become(work, ControlPipe(theirs), held)
                children.append(child)
                lines.append(ControlPipe(mine))
                theirs.close()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, held)
        yield lines
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)  # not reaped yet, so the number is still its own
        for child in children:
            os.waitpid(child, 0)
        for line in lines:
            line.connection.close()


def _become(work: ForkedWork, line: ControlPipe, mask: set[int]) -> None:
    """Never returns into the parent's own code."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C, and ends its children
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        work(line)
    except BaseException as error:
        line.say(failed=encode(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def answer(*lines: ControlPipe) -> dict[str, Any]:
    """What the first of the processes says that says something.

    Raises `TaskError` with its traceback, or `ProcessLost` if it is gone.
    """
    ready = wait([line.connection for line in lines])[0]
    said = next(line for line in lines if line.connection is ready).hear()
    if said is None:
        raise ProcessLost("a process of the measurement was killed: is there too little memory?")
    if "failed" in said:
        raise TaskError.told(said["failed"])
    return said
