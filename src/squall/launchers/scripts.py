"""A user's own script under `squall run`: it runs once until it joins, and from there on once per replica.

The nursery runs the script. Where that calls `squall.join`, the nursery forks the replicas, each of which returns from
`join` into a script of its own, and stays behind as the nursery: a replacement is one more fork from the same place.
What the coordinator has to know (how many examples, in which batches) a script says only in `session.batches`, so the
coordinator and the shards are forked when the first replica has come so far.

The coordinator is in charge of a script from `session.batches` to the end of the training, and the nursery before and
after: who stops the run then ends the scripts where they are, and a leader that dies then fails the run.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
import traceback
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from squall.errors import SnapshotMismatch, TaskError
from squall.launchers.building import build_job, warn_of_threads
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.late_rows import add_end, add_values
from squall.launchers.nursery import (
    DONE,
    GRACE_S,
    RAISED,
    Child,
    Nursery,
    explain,
    hear_launch,
)
from squall.launchers.script_replica import ReplicaSide
from squall.launchers.script_start import Over, chosen, run_file
from squall.protocol.nodes import Node
from squall.record.rows import RecordError
from squall.runtime import attempts
from squall.runtime.job import Job
from squall.runtime.machines import nodes
from squall.runtime.optimizers import check_optimizers, state_name
from squall.session.joined import Counted, joined_task
from squall.session.side import Side
from squall.task import OptimizerFactory
from squall.usercode.blame import encode


class _Forked(BaseException):
    """In a replica that was just forked: unwinds the nursery's frames, back into the script's `join`."""

    def __init__(self, node: Node, line: ControlPipe) -> None:
        self.node = node
        self.line = line


class ScriptNursery(Nursery):
    """A nursery whose replicas are scripts."""

    def __init__(self, launcher: ControlPipe, job: Job, sockets: Path) -> None:
        super().__init__(launcher, job, sockets)
        self._scripts: dict[Connection, ControlPipe] = {}
        self._trained_on: dict[str, Any] | None = None  # what the scripts said
        self._unfinished: dict[int, str] = {}  # replica -> how its last process was lost

    def run(self) -> None:
        """Raises `_Forked` in every replica."""
        self.prepare()
        for index in range(self._job.recipe.replicas):
            self._fork(Node("replica", index))
        self.watch()

    def _lines(self) -> list[Connection]:
        return [*super()._lines(), *self._scripts]

    def _attend(self, source: object) -> None:
        if not isinstance(source, Connection) or source not in self._scripts:
            super()._attend(source)
            return
        said = self._scripts[source].hear()
        if said is None:
            del self._scripts[source]
        elif said["kind"] == "leave":
            self._coordinator.say(kind="stop", why=said["why"], wanted=True)
        elif said["kind"] == "logged":
            self._scripts[source].say(kind="noted", error=self._log(said["values"]))
        else:
            self._begin(said)

    def _log(self, values: dict[str, str]) -> str:
        """What a script behind its loop has measured; why it cannot be recorded, or nothing."""
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
        """A script may have much to do when its training is over. If that was not well it has the time of a stop.

        One that has not begun hears no other end than the interrupt.
        """
        assert self._end is not None
        if self._end["status"] != "finished":
            self._hurry()
            self._interrupt_scripts()
        for line in self._scripts.values():
            line.say(kind="ended", **self._end)
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
        """All other processes, and scripts from `session.batches` to the end of the training, take no notice."""
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
        """What the record says of a finished run."""
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
        sys.stdout.flush()
        sys.stderr.flush()
        mine, theirs = Pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            self._look_after(node, pid)
            self._unfinished.pop(node.index, None)
            self._scripts[mine] = ControlPipe(mine)
            return
        self._detach(parent)
        mine.close()
        for other in self._scripts:
            other.close()
        raise _Forked(node, ControlPipe(theirs))


def serve_script(launcher: ControlPipe, message: dict[str, Any], sockets: Path) -> None:
    """Run the script; returns in the nursery only, when everything is over."""
    order = hear_launch(launcher)
    if order is None:
        return
    joined: list[ReplicaSide] = []
    forked_as: list[Node] = []

    def join(model: nn.Module, optimizer: OptimizerFactory | None, options: dict[str, Any]) -> Side:
        strategy = chosen(message["strategy"], optimizer, message["optimizer_chosen"])
        warn_of_threads("the script")
        check_optimizers(strategy.recipe())  # what torch imports for a first step would keep others waiting
        task = joined_task(model, options)
        job = build_job({**message, "strategy": strategy}, task, Path(order["directory"]), order["snapshot"])
        if job.restored is not None:
            job.restored.manifest.check_optimizer(state_name(job.recipe))
        if job.recipe.shards > job.layout.elements:
            raise ValueError(f"{job.recipe.shards} shards for {job.layout.elements} parameters: use fewer shards")
        job = attempts.begin(job, script=True)
        try:
            ScriptNursery(launcher, job, sockets).run()
        except _Forked as forked:
            forked_as.append(forked.node)
            joined.append(replica := ReplicaSide(job, forked.node, sockets, forked.line))
            sys.unraisablehook = partial(_unraisable, replica)
            return replica
        raise Over

    path = Path(message["script"])
    try:
        main = run_file(path, message["text"], message["arguments"], message["plan"].seed, join)
        _check_training(joined, path)
        _end_training(joined[0], path)
        del main
    except Over:
        return
    except BaseException as error:
        if not forked_as:  # still the nursery
            raise TaskError(_story(error)) from None
        for replica in joined:
            _leave_quietly(replica, error)
            replica.note(error)
        (sockets / f"{forked_as[0]}.traceback").write_text(_story(error))
        _leave(RAISED)
    _leave(DONE)


def _end_training(replica: ReplicaSide, path: Path) -> None:
    """The script is at its end, and may still hold batches, as frameworks' own cycles do."""
    if replica.status == "running" and replica.rank == 0:
        sys.stderr.write(
            f"squall: warning: the training went on to the end of {path}: what the script measured or saved behind its"
            " loop was not of the final weights. Call close() on what session.batches has returned, behind the loop\n"
        )
    replica.leave()


def _leave_quietly(replica: ReplicaSide, error: BaseException) -> None:
    """Leave, if it is not the script that has failed: the launching process says what happened to the run."""
    over = replica.status not in ("running", "finished")
    if over and error is not replica.ended_with and not isinstance(error, SystemExit | KeyboardInterrupt):
        traceback.print_exc()  # it comes of that, or hides it
    if over or (isinstance(error, KeyboardInterrupt) and (replica.status == "finished" or not replica.began)):
        _leave(DONE)


def _story(error: BaseException) -> str:
    return str(error) if isinstance(error, _Unfinished | SnapshotMismatch) else encode(error)


def _unraisable(replica: ReplicaSide, found: sys.UnraisableHookArgs) -> None:
    """A `break` lets go of the batches where Python ignores exceptions; code behind the loop does not run even so.

    Nor does it after an interrupt that came there.
    """
    if isinstance(found.exc_value, KeyboardInterrupt) or (found.exc_value and found.exc_value is replica.ended_with):
        _leave(DONE)
    sys.__unraisablehook__(found)


class _Unfinished(Exception):
    """The script ended and has not trained."""


def _check_training(joined: list[ReplicaSide], path: Path) -> None:
    if not joined:
        raise _Unfinished(f"{path} ended without calling squall.join(model): call it before the training loop")
    if not joined[0].began:
        raise _Unfinished(f"{path} ended without training: iterate over session.batches, and call session.step(loss)")


def _leave(status: int) -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
