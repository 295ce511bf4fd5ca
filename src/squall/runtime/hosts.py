"""What each role's effects work on. The real driver and the inline driver use the same hosts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from squall.errors import ProcessLost
from squall.protocol.copied import CopyMore, CopyTo
from squall.protocol.effects import (
    Apply,
    Compute,
    Effect,
    End,
    EvaluateModel,
    Expect,
    KeepWeights,
    Payload,
    PreparePush,
    UseWeights,
    WriteSnapshot,
)
from squall.protocol.events import CopyKnown, Event, GradientComputed, ModelEvaluated, StepTaken
from squall.protocol.nodes import Node
from squall.protocol.unsaved import GoBack
from squall.runtime import best, whole
from squall.runtime.backward import Backward, ModelOnVector, pin
from squall.runtime.batches import Key
from squall.runtime.compute import Gradients
from squall.runtime.copies import Copying
from squall.runtime.driver import Host, HostAround
from squall.runtime.evaluate import evaluate
from squall.runtime.inside import Inside
from squall.runtime.job import Job
from squall.runtime.legacy import Legacy
from squall.runtime.local import LocalTraining
from squall.runtime.snapshot import Snapshots
from squall.runtime.store import Store


class ReplicaHost(Host):
    """A model, its batches, and its slot of the arena."""

    def __init__(self, job: Job, slot: int, inside: Inside | None = None, own: Tensor | None = None) -> None:
        """`inside`: this process's place in a replica of several, which share `own`, float32 [length] of zeros."""
        shape, arena = job.arena.shape, job.arena
        weights = [arena.weights(slot, b) for b in range(shape.weights)]
        gradients = [arena.gradient(slot, b) for b in range(shape.gradients)]
        rates = [arena.rates(slot, b) for b in range(shape.weights)]
        device = job.device(slot)
        if device.type == "cuda":
            for memory in (*weights, *gradients):
                pin(memory)
        self.training: Gradients | LocalTraining
        if job.recipe.work.local is None:
            backward = Backward(job.task, job.layout, weights, job.plan.seed, device, inside)
            self.training = Gradients(backward, gradients, rates)
        else:
            own = torch.zeros_like(weights[0], device=device) if own is None else own
            backward = Backward(job.task, job.layout, [own], job.plan.seed, device, inside)
            self.training = LocalTraining(backward, own, job.recipe, weights[0], gradients[0])
            if backward.inside.speaks:
                job.keep(self.training.schedule)

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case Compute():
                return self.training.compute(effect)
            case UseWeights(buffer):
                self.training.use(buffer)
            case PreparePush():
                assert isinstance(self.training, LocalTraining)
                self.training.prepare_push()
            case Expect(epoch, start, stop):
                self.training.batches.expect(Key(epoch, start, stop))
            case End():
                self.training.batches.close()
            case _:
                raise AssertionError(f"a replica cannot {effect!r}")
        return None

    def rest(self) -> None:
        self.training.batches.prepare()


class SlowedHost(HostAround):
    """A replica that sleeps after each computation, as if its machine were slower by a ratio."""

    def __init__(self, host: Host, ratio: float) -> None:
        super().__init__(host)
        self._ratio = ratio

    def perform(self, effect: Effect, now: float) -> Event | None:
        return self._slowed(self._host.perform(effect, now))

    def poll(self) -> Event | None:
        return self._slowed(self._host.poll())

    def _slowed(self, event: Event | None) -> Event | None:
        if isinstance(event, GradientComputed | StepTaken):
            seconds = event.seconds if isinstance(event, GradientComputed) else event.compute_s
            time.sleep(seconds * (self._ratio - 1))
        return event


class ShardHost(Host):
    """A store, and where its snapshots go."""

    def __init__(self, job: Job, index: int, goes_back: bool = True) -> None:
        """`goes_back`: it makes copies of its numbers, to go back to one of them."""
        self._index = index
        self._shards = job.recipe.shards
        self._ranges = job.ranges
        legacy = job.legacies.get(index)
        numbers = None if legacy is None else legacy.numbers
        before = self._before = 0 if job.restored is None else job.restored.updates
        self._legacy = legacy
        apart, fetched = (None, None) if legacy is None else (legacy.weights, legacy.fetched)
        self.store = Store(job.task, job.recipe, job.layout, index, job.arena, job.initial, numbers, apart, fetched)
        job.keep(self.store.schedule)
        self._snapshots = Snapshots(job.directory)
        if numbers is not None and numbers.lacking:
            raise ProcessLost(f"shard {index} has an optimizer whose state could not be shared")
        if numbers is not None and numbers.torn:
            if legacy is not None and legacy.copy.updates < 0:
                raise ProcessLost(f"shard {index} died inside an update, and there was no memory for a copy of it")
            # The first thing that it is asked is to `GoBack`.
        elif numbers is not None and numbers.updates:
            self.store.succeed(before + numbers.updates)
        elif job.restored is not None:
            self.store.restore(job.restored.tensors, job.restored.updates)
        self._copying = self._copies(legacy) if legacy is not None and goes_back else None
        self._scratch = job.scratch
        self._given = 0  # elements that its backup has

    @classmethod
    def of_copy(cls, job: Job, index: int, found: whole.Whole) -> ShardHost:
        """Of a backup, to which a shard has given this first."""
        legacy = job.legacies[index]
        legacy.numbers.begin_behind(found.updates - (0 if job.restored is None else job.restored.updates))
        if legacy.weights is None:
            found.lay(job.arena, job.ranges, index)
        host = cls(job, index, goes_back=False)
        host.store.take_outline(found.outline)
        return host

    def _copies(self, legacy: Legacy) -> Copying:
        copying = Copying(legacy, self.store.weights, self._before)
        if legacy.copy.updates < 0:  # at first, and where somebody has died over making one
            self.store.leave()
            copying.make()
        return copying

    def attach(self, payload: Payload) -> None:
        if payload.kind not in ("weights", "trial"):
            return  # what goes to a backup lies where it is read
        self.store.deliver(payload.slot, payload.buffer, self._ranges(payload) if payload.part >= 0 else None)
        self.delivered(payload)

    def delivered(self, payload: Payload) -> None:
        """By a shard, of which this may be the backup. Of an answer in parts the first comes last."""
        if payload.kind == "weights" and payload.part <= 0:
            self.store.keep_fetched(payload.slot)

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case Apply(terms, share, clock, rate, factors):
                self.store.apply(terms, share, clock, rate, factors)
                if self._copying is not None:
                    self._copying.updated()
            case CopyTo(Node() as backup, _, _, state, waiting, number):
                self._given = 0
                return self._pack(backup, number, self._first(state, waiting), last=False)
            case CopyMore(backup, number):
                start, self._given = self._given, self.store.piece_end(self._given)
                piece = whole.of_piece(self.store, start, self._given)
                return self._pack(backup, number, piece, last=self._given == len(self.store.weights))
            case CopyTo():
                pass
            case GoBack():
                assert self._legacy is not None
                self.store.go_back(self._legacy.copy, self._before + self._legacy.numbers.updates)
            case WriteSnapshot(number):
                return self._snapshots.write_shard(number, self._index, self._shards, self.store)
            case End():
                pass
            case _:
                raise AssertionError(f"a shard cannot {effect!r}")
        return None

    def _first(self, state: bytes, waiting: Sequence[Payload]) -> dict[str, Tensor]:
        """Of what its backup is given."""
        assert self._legacy is not None
        numbers = self._legacy.numbers
        if numbers.lacking:
            raise ProcessLost(f"shard {self._index} has an optimizer whose state cannot be copied: leave copies out")
        pushes = whole.of_pushes(self.store.arena, self._ranges, waiting)
        return {**whole.of_machine(state), **whole.of_shard(self.store, self._before + numbers.updates), **pushes}

    def _pack(self, backup: Node, number: int, tensors: dict[str, Tensor], last: bool) -> CopyKnown:
        assert self._scratch is not None
        most = whole.bytes_at_most(self.store.stop - self.store.start, self.store.arena.shape)
        return whole.packed(self._scratch, backup, number, tensors, most, last)

    def rest(self) -> None:
        if self._copying is not None:
            self._copying.rest()

    def poll(self) -> Event | None:
        return self._copying.told() if self._copying is not None else None


class EvaluatorHost(Host):
    """A model on the evaluator's slot, which lies behind the replicas'."""

    def __init__(self, job: Job) -> None:
        self._task, self._goes_on = job.task, job.alone
        slot = job.arena.shape.replicas
        self._device = job.device(slot)
        self._weights, self._layout, self._directory = job.arena.weights(slot, 0), job.layout, job.directory
        self._model = ModelOnVector(job.task.model, job.layout, [self._weights], self._device)

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case EvaluateModel(buffer):
                self._model.use(buffer)
                return ModelEvaluated(evaluate(self._task, self._model.model, self._device, on_batch=self._goes_on))
            case KeepWeights():
                return best.keep(self._directory, effect, self._weights, self._layout)
            case End():
                pass
            case _:
                raise AssertionError(f"the evaluator cannot {effect!r}")
        return None
