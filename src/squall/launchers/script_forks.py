"""What the nursery of every machine of a script's run does: its replicas are the script itself, forked where it joins.

What the coordinator has to know (how many examples, in which batches) a script says only in `session.batches`, so the
coordinator and the shards are forked when the first replica of all has come so far.
"""

from __future__ import annotations

import dataclasses
import signal
from abc import abstractmethod
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from squall.launchers.child import turn
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.lookout import Lookout
from squall.launchers.nursery import Nursery
from squall.protocol.nodes import Node
from squall.runtime.batches import Counted
from squall.runtime.job import Job
from squall.runtime.machines import nodes
from squall.runtime.processes import fork


class Forked(BaseException):
    """In a replica that was just forked: unwinds the nursery's frames, back into the script's `join`."""

    def __init__(self, job: Job, node: Node, pipe: ControlPipe) -> None:
        self.job = job
        self.node = node
        self.pipe = pipe


class Script(NamedTuple):
    """One that runs here."""

    replica: int
    pipe: ControlPipe


class ScriptForks(Nursery):
    """A nursery whose replicas are scripts."""

    def __init__(self, launcher: ControlPipe, job: Job, sockets: Path) -> None:
        super().__init__(launcher, job, sockets)
        self._lookout = Lookout(scripts=True)
        self._scripts: dict[Connection, Script] = {}
        self._trained_on: dict[str, Any] | None = None  # the data that the scripts told, once they have

    @abstractmethod
    def _hear_script(self, replica: int, said: dict[str, Any]) -> None: ...

    def _begin(self) -> None:
        """Raises `Forked` in every replica."""
        for node in nodes(self._job):
            if node.role == "replica":
                self._fork(node)

    def _train_on(self, data: dict[str, Any]) -> None:
        """The data is known: start whoever waits for it."""
        self._trained_on = data
        task = dataclasses.replace(self._job.task, train=Counted(data["examples"]), batch_size=data["batch_size"])
        plan = msgspec.structs.replace(self._job.plan, epochs=data["epochs"], steps=data["steps"])
        self._job = dataclasses.replace(self._job, task=task, plan=plan)
        for node in nodes(self._job):
            if node.role != "replica":
                self._fork(node)
        self._close_listeners()

    def _sources(self) -> list[Any]:
        return [*super()._sources(), *self._scripts]

    def _attend(self, source: object) -> None:
        if not isinstance(source, Connection) or source not in self._scripts:
            super()._attend(source)
            return
        replica, pipe = self._scripts[source]
        said = pipe.hear()
        if said is None:
            del self._scripts[source]
        else:
            self._hear_script(replica, said)

    def _answer(self, replica: int, error: str) -> None:
        """Whether what a script here has logged is recorded; "" if it is."""
        for script in self._scripts.values():
            if script.replica == replica:
                script.pipe.say(kind="noted", error=error)

    def _end_scripts(self, status: str, reason: str) -> None:
        """Tell the scripts how the training has ended.

        Behind a training that finished a script may take its time. Otherwise it has as long as after a stop, and is
        interrupted: a script that has not come to its batches listens to nothing else. Where the run moves, that is an
        interrupt too: the script begins again where it joins.
        """
        status = "interrupted" if status == "moved" else status
        if status != "finished":
            self._hurry()
            self._interrupt_scripts()
        for script in self._scripts.values():
            script.pipe.say(kind="ended", status=status, reason=reason)

    def _kill_waiting(self) -> None:
        """Scripts are told how the training has ended, and raise it."""

    def _interrupt_scripts(self) -> None:
        """Only those before `session.batches` and after the training do not ignore it."""
        for child in self._children.values():
            if child.node.role == "replica":
                signal.pidfd_send_signal(child.handle, signal.SIGINT)

    def _fork(self, node: Node, ends: Node | None = None) -> None:
        if node.role != "replica":
            super()._fork(node, ends)
            return
        mine, theirs = Pipe()
        pid = fork()
        if pid:
            theirs.close()
            self._look_after(node, pid)
            self._scripts[mine] = Script(node.index, ControlPipe(mine))
            return
        job = dataclasses.replace(self._job, turn=turn(node, self._children.values()))
        self._detach(node)
        mine.close()
        for other in self._scripts:
            other.close()
        raise Forked(job, node, ControlPipe(theirs))
