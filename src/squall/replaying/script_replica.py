"""A replica in the replay of a script's run: the process in which its loop runs, and what it is told and says."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import NamedTuple, NoReturn

import cloudpickle

from squall.launchers.script_replica import WholeBackend
from squall.protocol.effects import Compute, UseWeights
from squall.protocol.events import BatchSkipped, GradientComputed
from squall.protocol.messages import Factors, Inside
from squall.protocol.nodes import Node
from squall.replaying.nonfinite import Examination, NonFiniteBatch
from squall.replaying.processes import Failed
from squall.runtime.compute import Gradients
from squall.runtime.hosts import ReplicaHost
from squall.runtime.job import Job
from squall.runtime.local import LocalTraining
from squall.task import Batch, Task


class Began(NamedTuple):
    """What a script says to `session.batches`, as far as others than its replica must know."""

    examples: int
    batch_size: int
    workers: int


class Examine(NamedTuple):
    """The order to watch the computation of a batch."""

    batch: Compute


class ReplayBackend(WholeBackend):
    """What stands behind the session of a replica's process, or of that of its first part."""

    replayed = True

    def __init__(self, job: Job, node: Node, pipe: Connection) -> None:
        self.rank = node.index
        self.replicas = job.recipe.replicas
        self.several_steps = job.recipe.work.several_steps
        self._job = job
        self._node = node
        self._pipe = pipe
        self._host: ReplicaHost | None = None  # None: not begun
        self._in_use = (0, 0)
        self._batch: Compute | None = None  # handed out, and not stepped
        self._loaded: Batch = None
        self._order: Compute | Examine | None = None  # what comes next, if that is known
        self._examination: Examination | None = None
        self._stepped = False  # on that batch, which may be stepped again
        self._found: GradientComputed | BatchSkipped | NonFiniteBatch | None = None  # of the last batch, not said yet

    def begin(self, task: Task, epochs: int) -> None:
        self.began = True
        self._host = ReplicaHost(dataclasses.replace(self._job, task=task), self.rank, own=self._job.own)
        self._say(Began(task.examples, task.batch_size, task.loader.get("num_workers", 0)))

    @property
    def in_use(self) -> tuple[int, int]:
        return self._in_use

    @property
    def training(self) -> Gradients | LocalTraining:
        assert self._host is not None
        return self._host.training

    def next(self) -> Compute:
        """What the script does behind its step still belongs to the batch, so what came of it is said here."""
        self._batch = self._next_order()
        return self._batch

    def _next_order(self) -> Compute:
        """The batch that is computed on next, when all that is before it is performed."""
        if self._found is not None:
            self._say(self._found)
            self._found = None
        while self._order is None:
            try:
                order = pickle.loads(self._pipe.recv_bytes())  # from the process that forked this one
            except (EOFError, OSError):  # the replay is over
                os._exit(0)
            if isinstance(order, Compute | Examine):
                self._order = order
            else:
                assert self._host is not None
                if isinstance(order, UseWeights):
                    self._in_use = order.buffer, self._in_use[1] + 1
                self._say(self._host.perform(order, 0.0))
        return self._order.batch if isinstance(self._order, Examine) else self._order

    def load(self, effect: Compute) -> Batch:
        self._loaded = self.training.backward.load(effect)
        self._begin()
        return self._loaded

    def _begin(self) -> None:
        """The order is carried out from here on."""
        order, self._order = self._order, None
        if isinstance(order, Examine):
            self._examination = Examination(self._node, order.batch, self.training.backward, self._loaded)

    def accept(
        self, effect: Compute, loss: float | None, started: float, factors: Factors = (), over: bool = True,
        inside: Inside = (),
    ) -> bool:  # fmt: skip
        if self._stepped:  # on that batch, before
            if not _same(self._next_order(), effect):
                self.end(f"it stepped once more on {_words(effect)}")
            self._begin()
        if self._examination is not None:
            self._found = self._examination.end(loss)
            return True
        self._found = found = self.training.accept(effect, loss, started, factors, over)
        self._stepped = not over and found.finite
        if self._stepped:
            self._next_order()  # so that the weights are those of the next step
        else:
            self._batch = None
        return found.finite

    def done(self, effect: Compute) -> None:
        self._stepped, self._batch = False, None
        if self._order is not None and _same(self._next_order(), effect):
            self.end(f"it did not step once more on {_words(effect)}")

    def skip(self, effect: Compute) -> None:
        self._batch, self._found = None, BatchSkipped()

    def log(self, values: Mapping[str, float]) -> None:
        pass

    def leave(self, how: str = "it left its loop") -> None:
        """What the replica still performed behind its last batch is performed here; another batch is not wanted."""
        if self._host is None:
            self.end(how)
        batch = self.next() if self._batch is None else self._batch
        self.end(f"before it had stepped {_words(batch)}, {how}")

    def end(self, how: str) -> NoReturn:
        with contextlib.suppress(OSError):  # the replay wants no more either
            self._say(Failed(f"the script does not do what it did in {self._node}: {how}"))
        os._exit(0)

    def _say(self, answer: object) -> None:
        self._pipe.send_bytes(cloudpickle.dumps(answer))


def _same(batch: Compute, other: Compute) -> bool:
    return (batch.epoch, batch.start, batch.stop) == (other.epoch, other.start, other.stop)


def _words(batch: Compute) -> str:
    return f"examples {batch.start} to {batch.stop} of epoch {batch.epoch}"
