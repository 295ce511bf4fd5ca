"""The nursery of this machine, as the process sees it that has started it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.environment import environment
from squall.runtime.processes import ending

LEAVE_WITHIN_S = 1.0  # seconds that a process has to end when all is done


class NurseryProcess:
    """It leads a session of its own, which Ctrl-C does not reach."""

    def __init__(self, parts: bool = False) -> None:
        """`parts`: it will fork replicas of several processes."""
        mine, theirs = socket.socketpair()
        self._life, held = Pipe(duplex=False)  # its other end is open for as long as anybody lives who inherits it
        with theirs, held:
            self._process = start_nursery(theirs.fileno(), held.fileno(), parts)
        self.pid = self._process.pid
        self.pipe = ControlPipe(Connection(mine.detach()))

    def ending(self) -> str:
        """How it has ended, for people. What it has forked is gone as well."""
        code = self._process.wait()
        self.kill()
        return ending(code)

    @property
    def killed(self) -> bool:
        """Asked behind `ending`."""
        return self._process.returncode == -signal.SIGKILL

    def kill(self, within_s: float = LEAVE_WITHIN_S) -> bool:
        """End it and all that it has forked, whether they answer or not, and wait for that. Whether all are gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        return bool(wait([self._life], within_s))

    def close(self) -> None:
        """It ends by itself now, or is killed."""
        try:
            self._process.wait(LEAVE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.pipe.connection.close()
        self._life.close()


def start_nursery(pipe: int, life: int, parts: bool) -> subprocess.Popen[bytes]:
    """A new process that has these two descriptors: its end of the pipe, and what tells that it lives."""
    return subprocess.Popen(
        [sys.executable, "-c", _ENTRY, str(pipe)], pass_fds=[pipe, life], start_new_session=True,
        stdin=subprocess.DEVNULL, env=environment(parts),
    )  # fmt: skip


# Garbage collections find nothing in what is imported, and take a sixth of the time that torch does. At the end nobody
# waits for threads that the task may have started.
_ENTRY = """
import gc, os, sys
gc.disable()
from squall.launchers.nursery_main import main
gc.freeze()
gc.enable()
main(int(sys.argv[1]))
os._exit(0)
"""
