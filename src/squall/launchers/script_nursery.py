"""The nursery of a script's run: its replicas are the script itself, forked where it calls `squall.join`.

What the coordinator has to know (how many examples, in which batches) a script says only in `session.batches`, so the
coordinator and the shards are forked when the first replica has come so far.

The coordinator is in charge of a script from `session.batches` to the end of the training, and the nursery before and
after: who stops the run then ends the scripts where they are, and a leader that dies then fails the run.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import msgspec

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.late_rows import add_end, add_values
from squall.launchers.nursery import GRACE_S, RAISED, Child, Nursery, explain
from squall.protocol.events import StopRequested
from squall.protocol.nodes import Node
from squall.record.rows import RecordError
from squall.runtime.batches import Counted
from squall.runtime.job import Job
from squall.runtime.machines import nodes
from squall.runtime.processes import fork


class Forked(BaseException):
    """In a replica that was just forked: unwinds the nursery's frames, back into the script's `join`."""

    def __init__(self, node: Node, pipe: ControlPipe) -> None:
        self.node = node
        self.pipe = pipe


class ScriptNursery(Nursery):
    """A nursery whose replicas are scripts."""

    def __init__(self, launcher: ControlPipe, job: Job, sockets: Path) -> None:
        super().__init__(launcher, job, sockets)
        self._scripts: dict[Connection, ControlPipe] = {}
        self._trained_on: dict[str, Any] | None = None  # the data that the scripts told, once they have
        self._unfinished: dict[int, str] = {}  # replica -> how its last process was lost

    def run(self) -> None:
        """Raises `Forked` in every replica."""
        self.prepare()
        for index in range(self._job.recipe.replicas):
            self._fork(Node("replica", index))
        self.watch()

    def _sources(self) -> list[Any]:
        return [*super()._sources(), *self._scripts]

    def _attend(self, source: object) -> None:
        if not isinstance(source, Connection) or source not in self._scripts:
            super()._attend(source)
            return
        said = self._scripts[source].hear()
        if said is None:
            del self._scripts[source]
        elif said["kind"] == "leave":
            self._tell(StopRequested(said["why"], wanted=True))
        elif said["kind"] == "logged":
            self._scripts[source].say(kind="noted", error=self._log(said["values"]))
        else:
            self._begin(said)

    def _log(self, values: dict[str, str]) -> str:
        """Record what a script has measured behind its loop. Returns why that was not possible; "" if it was."""
        try:
            add_values(self._job, {name: float(value) for name, value in values.items()})
        except RecordError as error:
            return str(error)
        return ""

    def _begin(self, said: dict[str, Any]) -> None:
        if self._trained_on is not None:
            if said != self._trained_on:
                what = "session.batches must be given the same dataset length, batch_size and epochs in every replica"
                self._launcher.say(kind="failed", error=f"{what}: {said} after {self._trained_on}", task=False)
                self._kill_all()
            return
        self._trained_on = said
        if self._job.restored is not None:
            self._job.restored.manifest.check_examples(said["examples"])
        task = dataclasses.replace(self._job.task, train=Counted(said["examples"]), batch_size=said["batch_size"])
        plan = msgspec.structs.replace(self._job.plan, epochs=said["epochs"], steps=said["steps"])
        self._job = dataclasses.replace(self._job, task=task, plan=plan)
        for node in nodes(self._job):
            if node.role != "replica":
                self._fork(node)

    def _ended(self) -> None:
        """Tell the scripts how the training has ended.

        Behind a training that finished a script may take its time. Otherwise it has as long as after a stop, and is
        interrupted: a script that has not come to its batches listens to nothing else.
        """
        assert self._end is not None
        if self._end["status"] != "finished":
            self._hurry()
            self._interrupt_scripts()
        for pipe in self._scripts.values():
            pipe.say(kind="ended", **self._end)
        if self._stopping and self._end["status"] == "finished":
            self._stop(self._stopping)  # it came too late for the training, and not for the scripts

    def _stop(self, why: str) -> None:
        if self._trained_on is not None and self._end is None:
            super()._stop(why)
            return
        if self._trained_on is None:
            self._end = {"status": "interrupted", "reason": f"{why} before the training began"}
        self._amend("interrupted", f"{why} when the training was complete, and the script not at its end")
        self._killing = True
        self._deadline = time.monotonic() + GRACE_S
        self._interrupt_scripts()

    def _interrupt_scripts(self) -> None:
        """Send SIGINT to all. Only scripts before `session.batches` and after the training do not ignore it."""
        for child in self._children.values():
            signal.pidfd_send_signal(child.handle, signal.SIGINT)

    def _lose(self, child: Child, code: int) -> None:
        super()._lose(child, code)
        if child.node.role != "replica":
            return
        if self._trained_on is None:
            self._kill_all()  # there is no coordinator to replace it
        elif self._end is None or code != 0:  # behind its loop a script may leave by os._exit(0)
            why = f"the script of replica {child.node.index} (pid {child.pid}) did not come to its end: {explain(code)}"
            self._unfinished[child.node.index] = why
            if code == RAISED:
                self._amend("failed", why)

    def _verdict(self) -> dict[str, Any]:
        """The coordinator has judged the training; scripts may have been lost since."""
        for replica, why in sorted(self._unfinished.items()):
            if replica == 0:
                self._amend("failed", f"{why}; the training is complete, in the last snapshot")
            elif self._end is not None and self._end["status"] == "finished":
                sys.stderr.write(f"squall: warning: {why}\n")
        return super()._verdict()

    def _amend(self, status: str, reason: str) -> None:
        """Change the end of a run that had finished, here and in the record."""
        if self._end is None or self._end["status"] != "finished":
            return
        self._end = {"status": status, "reason": reason}
        try:
            add_end(self._job, status, reason)
        except RecordError as error:
            sys.stderr.write(f"squall: warning: the record does not say that the script was {status}: {error}\n")

    def _fork(self, node: Node) -> None:
        if node.role != "replica":
            super()._fork(node)
            return
        mine, theirs = Pipe()
        pid = fork()
        if pid:
            theirs.close()
            self._look_after(node, pid)
            self._unfinished.pop(node.index, None)
            self._scripts[mine] = ControlPipe(mine)
            return
        self._detach()
        mine.close()
        for other in self._scripts:
            other.close()
        raise Forked(node, ControlPipe(theirs))
