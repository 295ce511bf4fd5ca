"""A user's own script under `squall run`: it runs once until it joins, and from there on once per replica.

The nursery runs the script. Where that calls `squall.join`, the nursery forks the replicas, each of which returns from
`join` into a script of its own, and stays behind as the nursery: a replacement is one more fork from the same place.
What the coordinator has to know (how many examples, in which batches) a script says only in `session.batches`, so the
coordinator and the shards are forked when the first replica has come so far.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import closing
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from squall.errors import SnapshotMismatch, TaskError
from squall.joined import Counted, joined_task
from squall.launchers.joining import Over, chosen, run_file
from squall.launchers.line import Line
from squall.launchers.nursery import DONE, RAISED, Child, Nursery, build_job, hear_launch, warn_of_threads
from squall.launchers.roles import name_process, transport_of
from squall.protocol.core import COORDINATOR, Compute, Effect, Event, Node, ValuesLogged
from squall.protocol.messages import Factors
from squall.record import Metric, Record
from squall.report import Reader, summarize
from squall.runtime import attempts
from squall.runtime.driver import Driver
from squall.runtime.hosts import ReplicaHost
from squall.runtime.job import Job
from squall.runtime.machines import machine, nodes
from squall.runtime.optimizers import state_name
from squall.runtime.processes import keep_freed_memory
from squall.runtime.recording import RecordedReplica, recorded
from squall.runtime.snapshot import Snapshots
from squall.side import Side
from squall.task import Batch, OptimizerFactory, Task


class RunOver(SystemExit):
    """In a replica's script: the run has ended, and not well. The launching process says why."""


class _Forked(BaseException):
    """In a replica that was just forked: unwinds the nursery's frames, back into the script's `join`."""

    def __init__(self, node: Node, line: Line) -> None:
        self.node = node
        self.line = line


class ScriptNursery(Nursery):
    """A nursery whose replicas are scripts."""

    grace_s = math.inf  # a script may have much to do when its training is over

    def __init__(self, launcher: Line, job: Job, sockets: Path) -> None:
        super().__init__(launcher, job, sockets)
        self._scripts: dict[Connection, Line] = {}
        self._trained_on: dict[str, Any] | None = None  # what the scripts said

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
        else:
            self._begin(said)

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
        plan = msgspec.structs.replace(self._job.plan, epochs=said["epochs"])
        self._job = dataclasses.replace(self._job, task=task, plan=plan)
        for node in nodes(self._job):
            if node.role != "replica":
                self._fork(node)

    def _ended(self) -> None:
        assert self._end is not None
        for line in self._scripts.values():
            line.say(kind="ended", **self._end)

    def _reap(self, child: Child) -> None:
        super()._reap(child)
        if self._trained_on is None and child.node.role == "replica":
            self._kill_all()  # it raised, or was killed, before there was a coordinator to replace it

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
            self._scripts[mine] = Line(mine)
            return
        self._detach(parent)
        mine.close()
        for other in self._scripts:
            other.close()
        raise _Forked(node, Line(theirs))


class _ScriptHost(ReplicaHost):
    """A replica's host that leaves the computing to the script, and hears how the run ends."""

    def __init__(self, job: Job, slot: int, line: Line) -> None:
        super().__init__(job, slot)
        self._line = line
        self.wanted: Compute | None = None
        self.over: dict[str, Any] | None = None

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, Compute):
            self.wanted = effect
            return None
        return super().perform(effect, now)

    def poll(self) -> Event | None:
        if self.over is None and (not self._line.open or self._line.connection.poll()):
            self.hear()
        return None

    def hear(self) -> None:
        self.over = self._line.hear() or {"status": "failed", "reason": "the nursery is gone"}


class Replica(Side):
    """What stands behind the session of one replica."""

    def __init__(self, job: Job, node: Node, sockets: Path, line: Line) -> None:
        self.rank = node.index
        self.replicas = job.recipe.replicas
        self.began = False
        self._left = False
        self._job = job
        self._node = node
        self._sockets = sockets
        self._line = line
        self._logged: list[Mapping[str, float]] = []  # before there was anybody to tell
        torch.set_num_threads(job.plan.threads)
        keep_freed_memory()
        name_process(node, job)

    def begin(self, task: Task, epochs: int) -> None:
        self.began = True
        self._line.say(kind="begin", examples=task.examples, batch_size=task.batch_size, epochs=epochs)
        self._job = job = dataclasses.replace(self._job, task=task)
        self._await_coordinator()
        self._host = _ScriptHost(job, self.rank, self._line)
        self._transport = transport_of(job, self._node, self._sockets, self._line)
        self._seen = recorded(self._host, job, self._node)
        self._driver = Driver(machine(job, self._node), self._transport, self._seen)
        self._driver.start()
        for values in self._logged:
            self.log(values)

    def _await_coordinator(self) -> None:
        """What is said before it listens would be said again only a second later."""
        while not (self._sockets / str(COORDINATOR)).exists():
            if self._line.connection.poll(0.002):  # "ended", or the nursery is gone: `next` hears it
                return

    def next(self) -> Compute | None:
        while self._host.wanted is None and self._driver.end is None and self._host.over is None:
            self._driver.step()
        if self._driver.end is None and self._host.over is None:
            return self._host.wanted
        self._finish()  # the run may have ended without this replica: the others were done before it had joined
        return None

    def load(self, effect: Compute) -> Batch:
        return self._host.training.backward.load(effect)

    def accept(self, effect: Compute, loss: float | None, started: float, factors: Factors = ()) -> None:
        self._host.wanted = None
        found = self._host.training.accept(effect, loss, started, factors)
        if isinstance(self._seen, RecordedReplica):
            self._seen.computed(effect, found.finite)
        self._driver.post(found)

    def log(self, values: Mapping[str, float]) -> None:
        if not self.began:
            self._logged.append(values)
        elif not self._left:
            self._driver.post(ValuesLogged(dict(values)))
        else:
            self._log_final(values)

    def _log_final(self, values: Mapping[str, float]) -> None:
        """The coordinator has closed the record: what comes now is of the final weights."""
        path = self._job.directory / "run.sqlite"
        with closing(Reader(path)) as reader:
            done = summarize(reader)
        epoch = done.examples // self._job.task.examples
        with closing(Record(path)) as record:
            for name, value in values.items():
                record.add(Metric(done.training_s, epoch, done.examples, done.updates or 0, name, value))

    def leave(self) -> None:
        """A batch under way is given up; whoever computes when a run is stopped is not waited for."""
        if self._left:
            return
        self._left = True
        if self._host.over is None and self.next() is None:
            return  # the batch stepped last was the last one that there was
        self._line.say(kind="leave", why=f"the script of replica {self.rank} took no more batches")
        self._finish()

    def _finish(self) -> None:
        """Wait for the last snapshot, and take its weights."""
        self._left = True
        if self._driver.end is not None:
            self._driver.finish()
        self._transport.close()
        while self._host.over is None:
            self._host.hear()
        if self._host.over["status"] not in ("finished", "interrupted"):
            raise RunOver(1)
        snapshots = Snapshots(self._job.directory)
        weights = snapshots.restore(snapshots.numbers()[-1], self._job.layout).tensors["weights"]
        self._job.layout.read_model(weights, self._job.task.model)


def serve_script(launcher: Line, message: dict[str, Any], sockets: Path) -> None:
    """Run the script; returns in the nursery only, when everything is over."""
    order = hear_launch(launcher)
    if order is None:
        return
    joined: list[Replica] = []
    forked_as: list[Node] = []

    def join(model: nn.Module, optimizer: OptimizerFactory | None, options: dict[str, Any]) -> Side:
        strategy = chosen(message["strategy"], optimizer, message["optimizer_chosen"])
        warn_of_threads("the script")
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
            joined.append(Replica(job, forked.node, sockets, forked.line))
            return joined[0]
        raise Over

    path = Path(message["script"])
    try:
        run_file(path, message["text"], message["arguments"], message["plan"].seed, join)
        _check_training(joined, path)
        joined[0].leave()  # if something, such as a framework's own cycles, still holds its batches
    except Over:
        return
    except RunOver:
        _leave(DONE)
    except BaseException as error:
        story = str(error) if isinstance(error, _Unfinished | SnapshotMismatch) else traceback.format_exc()
        if not forked_as:  # still the nursery
            raise TaskError(story) from None
        (sockets / f"{forked_as[0]}.traceback").write_text(story)
        _leave(RAISED)
    _leave(DONE)


class _Unfinished(Exception):
    """The script ended and has not trained."""


def _check_training(joined: list[Replica], path: Path) -> None:
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
