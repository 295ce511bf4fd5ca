"""A run as processes on this machine, seen from the process that launches it."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import cloudpickle

from squall.errors import ProcessLost, SquallError, TaskError
from squall.evaluation_callback import EvaluationCallback
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.environment import environment
from squall.protocol.effects import End
from squall.protocol.nodes import COORDINATOR, Node
from squall.record.rows import RecordError
from squall.runtime.processes import ending, standing_still
from squall.usercode.blame import decode
from squall.usercode.shipping import ship

ANSWER_WITHIN_S = 2.0  # seconds that the nursery has to answer to a stop
INSISTED_S = 1.0  # seconds until a run that was asked twice to stop is killed
LEAVE_WITHIN_S = 1.0  # seconds that a process has to end when all is done


class LocalRun:
    """Starts the nursery as early as possible: it imports torch while the launching process checks the task."""

    def __init__(self) -> None:
        # The nursery makes this directory, when it can also see to it that it is removed.
        self._sockets = Path(tempfile.gettempdir()) / f"squall-{secrets.token_hex(8)}"
        mine, theirs = socket.socketpair()
        self._life, held = Pipe(duplex=False)  # its other end is open for as long as anybody lives who inherits it
        self._environment = dict(os.environ)
        with theirs, held:
            self._process = start_nursery(theirs.fileno(), held.fileno())
        self._pipe = ControlPipe(Connection(mine.detach()))
        self._launched = False
        self._listening = False  # whether the nursery does; before, it runs the user's code
        self._stops = 0  # how often a stop was asked for
        self._kill_at = math.inf
        self.ended: End | None = None
        self._exits: list[dict[str, Any]] = []

    def prepare(self, code: dict[str, Any], message: dict[str, Any]) -> None:
        """Have the task built, beside the check of it here. `code` holds the user's functions, shipped by value."""
        changed = {k: v for k, v in os.environ.items() if self._environment.get(k) != v}  # by the user's file, say
        blob = {
            **message, "environment": changed, "sockets": str(self._sockets), "sys_path": sys.path, "code": ship(code),
            "launcher": os.getpid(),
        }  # fmt: skip
        self._pipe.connection.send_bytes(cloudpickle.dumps(blob))

    def launch(self, directory: Path, snapshot: int | None, lock: int) -> None:
        """Start the run's processes. `lock` is the descriptor of the directory's, which they will hold as well."""
        self._launched = True
        self._pipe.say(kind="launch", directory=str(directory.resolve()), snapshot=snapshot)
        self._pipe.hand(lock)

    def attend(self, timeout_s: float, watch: EvaluationCallback) -> None:
        """Wait for the nursery to say something. Raises what ended the run, if that was an error."""
        if self.ended is not None:
            return
        if not self._pipe.connection.poll(timeout_s):
            if time.monotonic() >= self._kill_at:
                self._kill()
                silent = f"; the nursery (pid {self._process.pid}) did not answer, and was killed"
                self.ended = End("interrupted", "interrupted" + (silent if self._stops == 1 else " at once"))
            return
        said = self._pipe.hear()
        if said is None:
            raise ProcessLost(f"the nursery (pid {self._process.pid}) was lost: {ending(self._process.wait())}")
        match said["kind"]:
            case "listening":
                self._listening = True
            case "failed":
                raise TaskError.told(said["error"]) if said["task"] else SquallError(said["error"])
            case "stopping" if self._stops == 1:
                self._kill_at = math.inf  # it sees to the others
            case "evaluated":
                watch.told(said["evaluation"])
                if watch.why:
                    self._pipe.say(kind="leave", why=watch.why, failed=watch.error is not None)
            case "exited":
                self._exits.append(said)
            case "ended":
                self._on_ended(said["status"], said["reason"])

    def _on_ended(self, status: str, reason: str) -> None:
        for failure in (e for e in self._exits if e["traceback"]):
            if Node.parse(failure["node"]) == COORDINATOR:
                found = decode(failure["traceback"])
                plain = found is not None and found.type == RecordError.__name__ and found.message
                raise SquallError(f"the coordinator failed\n{plain or found}")
            raise TaskError.told(failure["traceback"])
        for loss in self._exits:
            node = Node.parse(loss["node"])
            if node.role in ("coordinator", "shard") and status in ("", "failed"):  # else all was over for it
                name = node.role if node == COORDINATOR else f"{node.role} {node.index}"
                raise ProcessLost(f"{name} (pid {loss['pid']}) was lost: {loss['why']}")
        if not status:
            raise SquallError("all processes of the run were killed")
        self.ended = End(status, reason)

    def standing_still(self) -> list[str]:
        """Processes of the run that are stopped, in words."""
        return standing_still(self._process.pid)

    def stop(self) -> None:
        """Ask for a snapshot and an orderly end. Asked again, this kills what has not ended soon.

        Before the nursery listens there is nothing to keep.
        """
        if not self._listening:
            self._kill()
            self.ended = End("interrupted", "interrupted before the training began")
            return
        self._stops += 1
        self._kill_at = time.monotonic() + (ANSWER_WITHIN_S if self._stops == 1 else INSISTED_S)
        self._pipe.say(kind="stop")

    def close(self) -> None:
        """Nothing is left running when this returns. May be called again."""
        if self._pipe.connection.closed:
            return
        if not self._launched:
            self._kill()
        elif self.ended is None:
            self._pipe.say(kind="kill")
        try:
            self._process.wait(LEAVE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._kill()
        self._pipe.connection.close()
        self._life.close()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _kill(self) -> None:
        """End the nursery and all that it has forked, whether they answer or not, and wait until they are gone."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        wait([self._life], LEAVE_WITHIN_S)


def start_nursery(pipe: int, life: int) -> subprocess.Popen[bytes]:
    """A new process that has these two descriptors: its end of the pipe, and what tells that it lives."""
    return subprocess.Popen(
        [sys.executable, "-c", _ENTRY, str(pipe)], pass_fds=[pipe, life], start_new_session=True,
        stdin=subprocess.DEVNULL, env=environment(),
    )  # fmt: skip


# Leaves without waiting for threads that the task may have started.
_ENTRY = "import os, sys; from squall.launchers.nursery_main import main; main(int(sys.argv[1])); os._exit(0)"
