"""One replica whose computing is a user's script: what stands behind its session under `squall run`."""

from __future__ import annotations

import dataclasses
import signal
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from squall.errors import Interrupted, NotFinite, SquallError
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.last_weights import last_weights
from squall.launchers.role_processes import blame, close, connections, name_process
from squall.launchers.script_hosts import Ending, GroupedHost, ShardedHost
from squall.parts.host import Watch
from squall.protocol.effects import Compute
from squall.protocol.events import BatchOver, BatchSkipped, ValuesLogged
from squall.protocol.messages import Factors, Inside
from squall.protocol.nodes import COORDINATOR, Node
from squall.record.rows import RecordError
from squall.runtime.batches import Steps
from squall.runtime.compute import Gradients
from squall.runtime.driver import Driver
from squall.runtime.interrupts import LeftToLauncher
from squall.runtime.job import Job
from squall.runtime.kinds import machine
from squall.runtime.local import LocalTraining
from squall.runtime.processes import keep_freed_memory
from squall.session.backend import SessionBackend
from squall.strategies.work import Collective
from squall.task import Batch, Task
from squall.transports.opening import listening
from squall.usercode.blame import note_batch


class ScriptBackend(SessionBackend):
    """What stands behind the session of a process that a nursery has started.

    Attributes:
        began: the script has come to its batches.
        ended_with: what the training's end has raised in the loop.
    """

    began: bool = False
    ended_with: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """Add to an exception of the script where it was raised, and on which batch."""
        return None


def settle_in(job: Job) -> None:
    """Be a process of a replica, and no more what it was forked from."""
    torch.set_num_threads(job.plan.threads)
    keep_freed_memory()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the nursery; else the script's own
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(signal.getsignal(signal.SIGTERM), LeftToLauncher):
        signal.signal(signal.SIGTERM, LeftToLauncher())


def take_end(job: Job, status: str, reason: str) -> BaseException | None:
    """Take the last weights of a training that has ended so; what it raises if that was not well."""
    if status in ("finished", "interrupted") and (weights := last_weights(job)) is not None:
        job.layout.read_model(weights, job.task.model)
    kind = {"interrupted": Interrupted, "nonfinite": NotFinite}.get(status, SquallError)
    return kind(reason) if status != "finished" else None


class WholeBackend(ScriptBackend):
    """Of a whole replica, or of its first part."""

    @property
    @abstractmethod
    def in_use(self) -> tuple[int, int]:
        """The weights buffer that is computed on, and how often one was taken into use."""

    @property
    @abstractmethod
    def training(self) -> Gradients | LocalTraining:
        """Of its host."""

    def places(self, effect: Compute) -> Sequence[Tensor] | None:
        """Where gradients of that batch may lie at once, a view for each; None where that is not their buffer."""
        return self.training.places(effect) if isinstance(self.training, Gradients) else None

    @abstractmethod
    def accept(
        self, effect: Compute, loss: float | None, started: float, factors: Factors = (), over: bool = True,
        inside: Inside = (),
    ) -> bool:  # fmt: skip
        """`inside`: what the parts have spent."""


class ReplicaBackend(WholeBackend):
    """In a run."""

    def __init__(
        self, job: Job, node: Node, sockets: Path, pipe: ControlPipe, watch: Watch | None = None
    ) -> None:  # fmt: skip
        """`watch`: over the replica's other parts."""
        self.rank = node.index
        self.replicas = job.recipe.replicas
        self.several_steps = job.recipe.work.several_steps
        self._left = False
        self._job = job
        self._node = node
        self._sockets = sockets
        self._pipe, self._watch = pipe, watch
        self._ending = Ending(pipe, watch)
        self._rated = False  # the loop has set a rate of its own
        self._logged: list[Mapping[str, float]] = []  # values from before there was a coordinator
        settle_in(job)
        name_process(node, job)

    def begin(self, task: Task, epochs: int) -> None:
        self.began = True
        self._on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator ends the training
        steps = task.examples // task.batch_size if isinstance(task.train, Steps) else None
        limits = {"epochs": epochs if steps is None else None, "steps": steps}
        self._pipe.say(kind="begin", examples=task.examples, batch_size=task.batch_size, **limits)
        self._job = job = dataclasses.replace(self._job, task=task)
        # A message that is sent before the coordinator listens would be sent again only a second later.
        if job.site is None or job.site.has(COORDINATOR):
            while not (self._sockets / str(COORDINATOR)).exists():
                if self._pipe.connection.poll(0.002):  # "ended", or the nursery is gone: `next` hears it
                    break
        in_group = isinstance(job.recipe.work, Collective)
        if in_group and job.site is not None:
            job = dataclasses.replace(job, listener=listening())
        self._host = (GroupedHost if in_group else ShardedHost)(job, self._node, self._ending)
        wake_on = [*self._host.seen.wakes, *([] if self._watch is None else [self._watch.fileno()])]
        self._transport, self._carriers = connections(job, self._node, self._sockets, self._pipe, wake_on)
        self._driver = Driver(
            machine(job, self._node), self._transport, self._host.seen, carriers=self._carriers,
            entry=job.entry(self._node),
        )  # fmt: skip
        self._driver.start()
        for values in self._logged:
            self.log(values)

    def next(self) -> Compute | None:
        while self._host.wanted is None and not self._is_over:
            self._driver.step()
        if not self._is_over:
            return self._host.wanted
        self._finish()  # the run may have ended without this replica: the others were done before it had joined
        return None

    def note(self, error: BaseException) -> None:
        blame(error, self._node, self._job)
        batch = self._host.wanted if self.began else None
        if batch is not None:
            note_batch(error, batch.epoch, batch.start, batch.stop)

    def load(self, effect: Compute) -> Batch:
        return self._host.backward.load(effect)

    @property
    def in_use(self) -> tuple[int, int]:
        assert isinstance(self._host, ShardedHost)
        return self._host.in_use, self._host.uses

    @property
    def training(self) -> Gradients | LocalTraining:
        assert isinstance(self._host, ShardedHost)
        return self._host.training

    def accept(
        self, effect: Compute, loss: float | None, started: float, factors: Factors = (), over: bool = True,
        inside: Inside = (),
    ) -> bool:  # fmt: skip
        self._rated |= bool(set(factors) - {None, 1.0})
        first = next((each for each in factors if each is not None), 1.0)
        extras = {"rate_factor": first} if self._rated else None  # also where a loop comes back to its first rate
        finite, found = self._host.accept(effect, loss, started, factors, over, extras, inside)
        if found is not None:
            self._driver.post(found)
        while not self._host.ready and not self._is_over:
            self._driver.step()
        return finite

    @property
    def _is_over(self) -> bool:
        return self._driver.end is not None or self._ending.over is not None

    def done(self, effect: Compute) -> None:
        assert isinstance(self._host, ShardedHost)
        self._host.wanted = None
        if not self._is_over:
            self._driver.post(BatchOver())

    def skip(self, effect: Compute) -> None:
        self._host.skip(effect)
        self._driver.post(BatchSkipped())

    def log(self, values: Mapping[str, float]) -> None:
        """Values of the final weights are in the record when this returns; raises `RecordError`."""
        if not self.began:
            self._logged.append(values)
        elif not self._left:
            self._driver.post(ValuesLogged(dict(values)))
        else:
            told = {name: x if isfinite(x) else repr(x) for name, x in values.items()}  # JSON has no NaN
            self._pipe.say(kind="logged", values=told)
            answer = self._pipe.hear() or {"error": "the nursery is gone"}
            if answer["error"]:
                raise RecordError(answer["error"])

    def leave(self) -> None:
        """A batch under way is given up; what is done is pushed and told."""
        if self._left:
            return
        if self._ending.over is None and self.next() is None:
            return  # the batch stepped last was the last one that there was
        self._pipe.say(kind="leave", why=f"the script of replica {self.rank} took no more batches")
        self._driver.post(self._host.leave())
        while not self._is_over:
            self._driver.step()
        self._finish()

    def _finish(self) -> None:
        """Wait for the last snapshot, and take its weights. Raises what the training has ended with, if not well."""
        if not self._left:
            self._left = True
            self._settle()
        if self.ended_with is not None:
            raise self.ended_with

    def _settle(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._driver.end is not None:
            self._driver.finish()
        self._host.close()
        close(self._transport, self._carriers)
        while self._ending.over is None:
            self._ending.hear()
        self.status, reason = self._ending.over["status"], self._ending.over["reason"]
        self.ended_with = take_end(self._job, self.status, reason)
        signal.signal(signal.SIGINT, self._on_interrupt)  # last: nobody is to go on with half of the weights
