"""A run as processes on this machine, seen from the process that launches it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

from squall.blame import decode
from squall.errors import ProcessLost, SquallError, TaskError
from squall.launchers.environment import environment
from squall.launchers.line import Line
from squall.protocol.core import COORDINATOR, End, Node
from squall.runtime.processes import ending
from squall.shipping import ship


class LocalRun:
    """Starts the nursery as early as possible: it imports torch while the launching process checks the task."""

    def __init__(self) -> None:
        self._sockets = tempfile.mkdtemp(prefix="squall-")  # mode 0700
        mine, theirs = socket.socketpair()
        self._environment = dict(os.environ)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _ENTRY, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL, env=environment(),
            )  # fmt: skip
        self._line = Line(Connection(mine.detach()))
        self._launched = False
        self._listening = False  # the nursery: until then it runs the user's code
        self.ended: End | None = None
        self._exits: list[dict[str, Any]] = []

    def prepare(self, code: dict[str, Any], message: dict[str, Any]) -> None:
        """Have the task built, beside the check of it here. `code` holds the user's functions, shipped by value."""
        changed = {k: v for k, v in os.environ.items() if self._environment.get(k) != v}  # by the user's file, say
        blob = {
            **message, "environment": changed, "sockets": self._sockets, "sys_path": sys.path, "code": ship(code),
            "launcher": os.getpid(),
        }  # fmt: skip
        self._line.connection.send_bytes(cloudpickle.dumps(blob))

    def launch(self, directory: Path, snapshot: int | None, lock: int) -> None:
        """Start the run's processes. `lock` is the descriptor of the directory's, which they will hold as well."""
        self._launched = True
        self._line.say(kind="launch", directory=str(directory.resolve()), snapshot=snapshot)
        self._line.hand(lock)

    def attend(self, timeout_s: float) -> None:
        """Wait for the nursery to say something. Raises what ended the run, if that was an error."""
        if self.ended is not None or not self._line.connection.poll(timeout_s):
            return
        said = self._line.hear()
        if said is None:
            raise ProcessLost(f"the nursery (pid {self._process.pid}) was lost: {self._nursery_exit()}")
        match said["kind"]:
            case "listening":
                self._listening = True
            case "failed":
                raise TaskError.told(said["error"]) if said["task"] else SquallError(said["error"])
            case "exited":
                self._exits.append(said)
            case "ended":
                self._on_ended(said["status"], said["reason"])

    def _on_ended(self, status: str, reason: str) -> None:
        for failure in (e for e in self._exits if e["traceback"]):
            if Node.parse(failure["node"]) == COORDINATOR:
                raise SquallError(f"the coordinator failed\n{decode(failure['traceback'])}")
            raise TaskError.told(failure["traceback"])
        for loss in self._exits:
            node = Node.parse(loss["node"])
            if node.role in ("coordinator", "shard") and status in ("", "failed"):  # else all was over for it
                name = node.role if node == COORDINATOR else f"{node.role} {node.index}"
                raise ProcessLost(f"{name} (pid {loss['pid']}) was lost: {loss['why']}")
        if not status:
            raise SquallError("all processes of the run were killed")
        self.ended = End(status, reason)

    def stop(self) -> None:
        """Ask for a snapshot and an orderly end. Before the nursery listens there is nothing to keep."""
        if self._listening:
            self._line.say(kind="stop")
        else:
            os.killpg(self._process.pid, signal.SIGKILL)
            self.ended = End("interrupted", "interrupted before the training began")

    def close(self) -> None:
        """Nothing is left running when this returns. May be called again."""
        if self._line.connection.closed:
            return
        if not self._launched:
            os.killpg(self._process.pid, signal.SIGKILL)
        elif self.ended is None:
            self._line.say(kind="kill")
        try:
            self._process.wait(5.0 if self.ended is None else None)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._line.connection.close()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _nursery_exit(self) -> str:
        return ending(self._process.wait())


# Leaves without waiting for threads that the task may have started.
_ENTRY = "import os, sys; from squall.launchers.nursery import main; main(int(sys.argv[1])); os._exit(0)"
