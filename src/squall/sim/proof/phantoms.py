"""Hosts without numbers, on the same buffers as in a real run, so that every applied gradient can be told.

They share one memory, as the processes of a machine do, or have one each, and payloads travel with their frames. A
gradient buffer holds which batches were computed into it and on which versions. A weights buffer holds, for each shard,
the version that was written there and the *fold* of what the shard had applied: a number that depends on every update
and on their order, as weights do. What a shard applies is read from the buffers at that moment, as in a real run, so a
buffer that is used too early shows as a gradient applied twice, or as a fold that no log explains; and so does a
payload that has not come, or is not the one that its message tells of.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any
from zlib import crc32

from msgspec.structs import replace

from squall.protocol import effects, events
from squall.protocol.copied import CopyMore, CopyTo
from squall.protocol.effects import Effect, Payload
from squall.protocol.events import Event
from squall.protocol.messages import PIECE_BYTES
from squall.protocol.nodes import Node
from squall.protocol.unsaved import GoBack
from squall.runtime.driver import Host
from squall.sim.proof.broken import Broken
from squall.sim.proof.memory import AppliedBuffer, BatchRange, File, Gradient, Written, folded

if TYPE_CHECKING:
    from squall.sim.proof.phantom_hosts import PhantomHosts

COMPUTE_S = 0.01
PIECES = 2  # of a file that has to travel
NOTHING = File(-1)


class Phantom(Host):
    _pushed = 0  # clock of the last push

    def __init__(self, hosts: PhantomHosts, node: Node) -> None:
        self.hosts, self.node = hosts, node
        self.memory = hosts.memory(node)

    def attach(self, payload: Payload) -> None:
        """Of a replica on several machines: its other parts push as well."""
        if payload.kind == "gradient" and payload.part == 0 and payload.clock != self._pushed:
            self._pushed = payload.clock
            self.hosts.ask(self.node, events.PushAsked(payload.clock, payload.buffer))

    def outgoing(self, payload: Payload, to: Node) -> object | None:
        return self.memory.read(payload) if self.hosts.memories[to] is not self.memory else None

    def incoming(self, payload: Payload, numbers: object) -> None:
        self.memory.check_free(payload, self.hosts.now())
        self.memory.receive(payload, numbers)

    def perform(self, effect: Effect, now: float) -> Event | None:
        return None


class ReplicaPhantom(Phantom):
    active = 0
    _batch: effects.Compute | None = None  # may be stepped again
    _steps = 0  # further ones to come on that batch
    _stepped: BatchRange | None = None  # the batch of the last step

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case effects.Compute():
                return self._compute(effect)
            case effects.UseWeights(buffer):
                self.active = buffer
                if self._batch is not None and self._steps:
                    self._steps -= 1
                    return self._compute(self._batch, again=True)
                if self._batch is not None:
                    self._batch = self._stepped = None
                    return events.BatchOver()
                if self.hosts.logs and self.node.index == 0:
                    return events.ValuesLogged({"logged": 1.0})
        return None

    def _compute(self, effect: effects.Compute, again: bool = False) -> Event:
        hosts, slot = self.hosts, self.node.index
        hosts.computed += 1
        batch = (effect.epoch, effect.start, effect.stop)
        finite = not hosts.poison(hosts.computed, batch)
        seconds = 0.0 if again else hosts.compute_s(self.node)  # only `Compute` has a price
        self.memory.in_use[slot] = (self.active, hosts.now() + seconds)
        self._batch = None
        if hosts.breaks(hosts.computed) and not again:
            return events.LoopLeft()
        if hosts.leaves_out(hosts.computed) and not again:
            return events.BatchSkipped()
        if not effect.accumulate:
            self.memory.clear(slot, effect.buffer)
        if finite:
            basis = tuple(written.version for written in self.memory.weights[slot, self.active])
            gradient = Gradient(hosts.computed, *batch, basis, hosts.factors(hosts.computed), batch == self._stepped)
            self.memory.gradients[slot, effect.buffer].append(gradient)
            if hosts.steps_on is not None:
                self._batch, self._stepped = effect, batch
                self._steps = self._steps if again else hosts.steps_on(hosts.computed) - 1
        return events.GradientComputed(1.0, finite, seconds, hosts.factors(hosts.computed), over=hosts.steps_on is None)


class ShardPhantom(Phantom):
    pieces: Sequence[str] = ("fold", "applied")  # its backup is given these behind all else, in turn
    given = 0

    def __init__(self, hosts: PhantomHosts, node: Node, version: int, file: File | None) -> None:
        super().__init__(hosts, node)
        self.applied = list(file.applied) if file is not None else []
        self.version, self.fold = version, file.fold if file is not None else 0
        self.files: dict[int, File] = {}  # by the snapshot's number
        self.copy = version, File(self.fold, tuple(self.applied))
        self.fetched: dict[int, int] = {}  # slot -> the version that was delivered to it

    def dies(self) -> None:
        """What its process alone knew is gone, as are files on their way: they had no name any more."""
        self.given, self.files = 0, {}
        self.memory.pieces[self.node.index] = (-1, -1, NOTHING)

    def torn(self, inside: Effect) -> int | None:
        """It was killed inside this. Returns the version of its copy, if it needs one."""
        self.fold, self.applied = -1, []
        return self.copy[0]

    def attach(self, payload: Payload) -> None:
        if payload.kind == "piece":
            number = payload.version
            self.memory.put(payload, (number, payload.clock, self.files[number]))
        if payload.kind not in ("weights", "trial"):
            return
        self.delivered(payload)
        if self.hosts.memories[payload.owner] is self.memory:
            self.memory.check_free(payload, self.hosts.now())
        self.memory.write(payload, self.numbers(payload))

    def delivered(self, payload: Payload) -> None:
        """What it corrects a push with, if it does."""
        if payload.kind == "weights":
            self.fetched[payload.slot] = self.version

    @property
    def point(self) -> object:
        """How far it is."""
        return self.version

    def whole(self, waiting: Sequence[Payload] = ()) -> Any:
        """All that its backup is given, with these pushes."""
        return self.version, self.fold, tuple(self.applied), self._pushes(waiting), dict(self.fetched)

    def _pushes(self, waiting: Sequence[Payload]) -> Sequence[tuple[Payload, object]]:
        return [(each, self.memory.read(each)) for each in waiting]

    def take_whole(self, whole: Any) -> None:
        self.version, self.fold, applied, pushes, fetched = whole
        self.fetched = dict(fetched)
        self.applied = list(applied)
        self.copy = self.version, self.file()
        self._lay(pushes)

    def _lay(self, pushes: Sequence[tuple[Payload, object]]) -> None:
        for payload, numbers in pushes:
            self.memory.write(payload, numbers)

    def _give(self, backup: Node, number: int, part: object, last: bool) -> Event:
        if self.hosts.disk(0):
            return events.CopyKnown(backup, 0)
        self.memory.wholes[backup, number] = part
        return events.CopyKnown(backup, 1, last)

    def _check_fetched(self, slot: int, gradients: tuple[Gradient, ...]) -> None:
        """It has the weights that the push was computed on."""
        has = self.fetched.get(slot)
        for version in (gradient.basis[self.node.index] for gradient in gradients):
            if version != has:
                raise Broken("I27", f"slot {slot} has computed on version {version}, and for {self.node} it has {has}")

    def _found(self, term: effects.Term) -> tuple[Gradient, ...]:
        return self.memory.gradient(term.slot, term.buffer, self.node.index, self.hosts.others(term.owner))

    def numbers(self, payload: Payload) -> object:
        """What is there in place of the payload's numbers."""
        return Written(self.version, self.fold)

    def file(self) -> File:
        """What a snapshot keeps of it."""
        return File(self.fold, tuple(self.applied))

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case effects.Apply(terms):
                found = [(self._found(term), term.weight) for term in terms]
                if self.hosts.recipe.loop.update.compensation is not None:
                    self._check_fetched(terms[0].slot, found[0][0])
                for gradients, weight in found:
                    oldest = min((gradient.basis[self.node.index] for gradient in gradients), default=self.version)
                    self.applied.append(AppliedBuffer(gradients, self.version - oldest, weight))
                self.fold = folded(self.fold, found)
                self.version += 1
                if self.hosts.copies_every and self.version % self.hosts.copies_every == 0:
                    self.copy = self.version, File(self.fold, tuple(self.applied))
                    return events.CopyMade(self.version)
            case CopyTo(Node() as backup, _, _, state, waiting, number):
                self.given = 0
                return self._give(backup, number, (state, self.whole(waiting)), last=not self.pieces)
            case CopyMore(backup, number):
                self.given += 1
                piece = self.pieces[self.given - 1]
                numbers = piece, deepcopy(getattr(self, piece))
                return self._give(backup, number, numbers, last=self.given == len(self.pieces))
            case GoBack():
                _, copy = self.copy
                self.fold, self.applied = copy.fold, list(copy.applied)
            case effects.WriteSnapshot(number):
                file = self.files[number] = self.file()
                size = PIECES * PIECE_BYTES if self.hosts.machine(self.node) else 0
                if not size:
                    self.hosts.arrived[number, self.node.index] = file
                return events.SnapshotWritten(number, self.hosts.disk(number), file.checksum, size)
        return None


class PartPhantom(Phantom):
    """Of another part of a replica. It has computed what the first one has, into buffers of its own."""

    def __init__(self, hosts: PhantomHosts, node: Node) -> None:
        super().__init__(hosts, node)
        self._own = hosts.new_memory()

    def attach(self, payload: Payload) -> None:
        """A shard beside it looks into the memory of their machine."""
        beside = self.hosts.memories[Node("shard", payload.shard)] is self.memory
        computed = self.hosts.memories[payload.owner].read(replace(payload, part=-1))
        (self.memory if beside else self._own).put(payload, computed)

    def outgoing(self, payload: Payload, to: Node) -> object | None:
        return self._own.read(payload) if self.hosts.memories[to] is not self.memory else None

    def incoming(self, payload: Payload, numbers: object) -> None:
        self.memory.receive(payload, numbers)  # into buffers of its own: who had the slot before it may still compute


class EvaluatorPhantom(Phantom):
    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case effects.EvaluateModel(buffer):
                self.memory.in_use[self.node.index] = (buffer, self.hosts.now() + COMPUTE_S)
                measured = self.hosts.metrics or (lambda: {"loss": self._loss(buffer)})
                return events.ModelEvaluated(measured())
            case effects.KeepWeights(buffer, _, value):
                self.hosts.best = value, self._loss(buffer)
                return events.WeightsKept()
        return None

    def _loss(self, buffer: int) -> float:  # now better, now worse, and never the same of other weights
        return crc32(repr(self.memory.weights[self.node.index, buffer]).encode()) / 2**32
