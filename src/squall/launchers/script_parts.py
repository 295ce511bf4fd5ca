"""The parts of a replica whose computing is a user's script: each runs it, and the first speaks for all.

The others hear from it which batch is next, on which weights, and how the training has ended.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import msgspec
from torch import Tensor

from squall.launchers.script_replica import ScriptBackend, WholeBackend, settle_in, take_end
from squall.parts.meeting import Meeting
from squall.parts.neighbours import Neighbours
from squall.parts.spent import measured
from squall.protocol.effects import Compute
from squall.protocol.messages import Factors
from squall.protocol.nodes import Node
from squall.runtime.backward import Backward
from squall.runtime.job import Job
from squall.task import Batch, Task
from squall.usercode.blame import note, note_batch

MOST_TOLD = 800  # characters of a reason that fit into what is told


class Told(msgspec.Struct, array_like=True):
    """What the first part tells the others."""

    buffer: int = 0  # of weights, to compute on from now on
    uses: int = 0  # how often one was taken into use
    finite: bool = True  # the gradients of the batch stepped last
    batch: Compute | None = None  # that is next
    status: str = ""  # how the training has ended; "": it goes on
    reason: str = ""


class Speaking(ScriptBackend):
    """Of part 0, which is the replica to everybody else."""

    def __init__(self, replica: WholeBackend, job: Job, neighbours: Neighbours, scratch: Tensor) -> None:
        """`scratch` is float32 [length], shared by all parts."""
        self._replica, self._job, self._neighbours, self._scratch = replica, job, neighbours, scratch
        self._meeting = Meeting(neighbours, job.layout)
        self._over = False
        self.rank, self.replicas, self.several_steps = replica.rank, replica.replicas, replica.several_steps
        self.parts, self.group, self.replayed = neighbours.parts, neighbours.torch, replica.replayed

    @property
    def status(self) -> str:  # type: ignore[override]
        return self._replica.status

    @property
    def began(self) -> bool:  # type: ignore[override]
        return self._replica.began

    @property
    def ended_with(self) -> BaseException | None:  # type: ignore[override]
        return self._replica.ended_with

    def note(self, error: BaseException) -> None:
        self._replica.note(error)

    def begin(self, task: Task, epochs: int) -> None:
        self._meeting.begin(task.model, task.examples, task.batch_size, epochs)
        self._model = task.model
        self._replica.begin(task, epochs)

    def next(self) -> Compute | None:
        if self._over:
            return self._replica.next()
        self._neighbours.spent.look()
        self._meeting.meet("the next batch")
        effect = None
        try:
            effect = self._replica.next()
        finally:
            if effect is not None:
                self._tell(batch=effect)
            elif self._replica.status != "running":
                self._tell_over()
        return effect

    def load(self, effect: Compute) -> Batch:
        self._neighbours.spent.begin()
        batch = self._replica.load(effect)
        self._meeting.loaded(self._model)
        return batch

    def accept(
        self, effect: Compute, loss: float | None, started: float, factors: Factors = (), over: bool = True
    ) -> bool:  # fmt: skip
        parameters = self._job.layout.parameters_of(self._model)
        vector = sum_of(self._job, self.rank, effect, self._scratch)
        own = [parameter.grad for parameter in parameters]
        found, loss = self._meeting.add_up(self._model, vector, loss)
        places = self._replica.places(effect) if vector is not self._scratch else None
        for number, (parameter, gradient) in enumerate(zip(parameters, found)):
            if gradient is not None and places is not None:
                gradient = places[number]  # the same memory; so it is known that nothing has to be copied
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        inside = measured(self._neighbours.spent, self._neighbours.others.values())
        if not over:  # then it also waits for newer weights
            self._neighbours.spent.end()
        finite = self._replica.accept(effect, loss, started, factors, over, inside)
        for parameter, gradient in zip(parameters, own):
            parameter.grad = gradient
        self._tell(finite=finite)
        self._neighbours.spent.end()
        if not over:
            self._neighbours.spent.begin()
        return finite

    def done(self, effect: Compute) -> None:
        self._replica.done(effect)

    def skip(self, effect: Compute) -> None:
        self._meeting.meet("session.skip")
        self._neighbours.spent.end()
        self._replica.skip(effect)

    def log(self, values: Mapping[str, float]) -> None:
        self._replica.log(values)

    def leave(self) -> None:
        if self._over:
            self._replica.leave()
            return
        self._meeting.meet("the end of its loop")
        try:
            self._replica.leave()
        finally:
            if self._replica.status != "running":
                self._tell_over()

    def _tell(self, **said: Any) -> None:
        buffer, uses = self._replica.in_use
        with self._neighbours.together():
            self._neighbours.tell(msgspec.msgpack.encode(Told(buffer, uses, **said)))

    def _tell_over(self) -> None:
        self._over = True
        ended_with = self._replica.ended_with
        self._tell(status=self.status, reason="" if ended_with is None else str(ended_with)[:MOST_TOLD])


class Following(ScriptBackend):
    """Of any other part."""

    def __init__(
        self, job: Job, node: Node, neighbours: Neighbours, scratch: Tensor, replayed: bool = False
    ) -> None:  # fmt: skip
        self._job, self._node, self._neighbours, self._scratch = job, node, neighbours, scratch
        self._meeting = Meeting(neighbours, job.layout)
        self._uses = 0
        self._batch: Compute | None = None  # that is under way
        self.rank, self.replicas, self.several_steps = node.index, job.recipe.replicas, job.recipe.work.several_steps
        self.part, self.parts, self.group = neighbours.part, neighbours.parts, neighbours.torch
        self.replayed = replayed
        settle_in(job)

    def note(self, error: BaseException) -> None:
        where = f"in part {self.part} of replica {self.rank}"
        note(error, where, role=self._node.role, index=self._node.index)
        if self._batch is not None:
            note_batch(error, self._batch.epoch, self._batch.start, self._batch.stop)

    def begin(self, task: Task, epochs: int) -> None:
        self.began = True
        self._on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator ends the training
        job = self._job
        self._meeting.begin(task.model, task.examples, task.batch_size, epochs)
        weights = [job.arena.weights(self.rank, buffer) for buffer in range(job.arena.shape.weights)]
        sources = weights if job.own is None else [job.own]
        self._backward = Backward(task, job.layout, sources, job.plan.seed, job.device(self.rank))
        if job.own is not None:
            self._backward.on_vector.use(0)

    def next(self) -> Compute | None:
        self._batch = None
        if self.status == "running":
            self._neighbours.spent.look()
            self._meeting.meet("the next batch")
            self._batch = self._hear().batch
        if self.ended_with is not None:
            raise self.ended_with
        return self._batch

    def load(self, effect: Compute) -> Batch:
        self._neighbours.spent.begin()
        batch = self._backward.load(effect)
        self._meeting.loaded(self._backward.on_vector.model)
        return batch

    def accept(
        self, effect: Compute, loss: float | None, started: float, factors: Factors = (), over: bool = True
    ) -> bool:  # fmt: skip
        vector = sum_of(self._job, self.rank, effect, self._scratch)
        self._meeting.add_up(self._backward.on_vector.model, vector, loss)
        finite = self._hear().finite
        self._neighbours.spent.end()
        if not over:
            self._neighbours.spent.begin()
        return finite

    def skip(self, effect: Compute) -> None:
        self._meeting.meet("session.skip")
        self._neighbours.spent.end()

    def log(self, values: Mapping[str, float]) -> None:
        """The first part logs."""

    def leave(self) -> None:
        if self.status != "running":
            return
        self._batch = None
        self._meeting.meet("the end of its loop")
        self._hear()
        if self.ended_with is not None:
            raise self.ended_with

    def _hear(self) -> Told:
        with self._neighbours.together():
            told = msgspec.msgpack.decode(self._neighbours.hear(), type=Told)
        on_vector = self._backward.on_vector
        if self._job.own is not None:
            self._job.layout.read_buffers(self._job.own, on_vector.model)
        elif told.uses != self._uses:
            on_vector.use(told.buffer)
        self._uses = told.uses
        if told.status:
            self.status = told.status
            self.ended_with = take_end(self._job, told.status, told.reason)
            self._backward.batches.close()
            signal.signal(signal.SIGINT, self._on_interrupt)
        return told


def sum_of(job: Job, slot: int, effect: Compute, scratch: Tensor) -> Tensor:
    """Where the gradients of a batch are added up: at once in the buffer that is pushed, where that goes."""
    if job.own is not None or effect.accumulate or effect.local_step or job.device(slot).type != "cpu":
        return scratch
    return job.arena.gradient(slot, effect.buffer)
