"""Hosts without numbers, on the same buffers as in a real run, so that every applied gradient can be told.

They share one memory, as the processes of a machine do, or have one each, and payloads travel with their frames. A
gradient buffer holds which batches were computed into it and on which versions. A weights buffer holds, for each shard,
the version that was written there and the *fold* of what the shard had applied: a number that depends on every update
and on their order, as weights do. What a shard applies is read from the buffers at that moment, as in a real run, so a
buffer that is used too early shows as a gradient applied twice, or as a fold that no log explains; and so does a
payload that has not come, or is not the one that its message tells of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from zlib import crc32

from msgspec.structs import replace

from squall.protocol import effects, events
from squall.protocol.copied import CopyTo
from squall.protocol.effects import Effect, Payload, PublishSnapshot
from squall.protocol.events import Event
from squall.protocol.messages import PIECE_BYTES, Factors
from squall.protocol.nodes import Node
from squall.protocol.notes import Note
from squall.protocol.unsaved import GoBack
from squall.runtime.driver import Host
from squall.runtime.wire import Price
from squall.runtime.world import World
from squall.sim.proof.memory import AppliedBuffer, BatchRange, File, Gradient, Memory, Written, folded
from squall.strategies.base import Recipe

COMPUTE_S = 0.01
PIECES = 2  # of a file that has to travel
NOTHING = File(-1)
N = TypeVar("N", bound=Note)


class PhantomHosts:
    """Makes the hosts of a run, and holds what they share: memory, and what the coordinator's host was told."""

    def __init__(self, recipe: Recipe, now: Callable[[], float], first: int = 0) -> None:
        self.recipe = recipe
        self.now = now  # the world's time, in seconds
        self.travels = False  # every host has a memory of its own
        self.memories: dict[Node, Memory] = {}
        self.machine: Callable[[Node], int] = lambda node: 0  # on which a node is
        self.gone: Callable[[int], bool] = lambda machine: False  # a machine, with all that was there
        self.cut_off: Callable[[Node, Node], bool] = lambda one, other: False
        self.waits: Callable[[Node], bool] = lambda node: False  # for another part of the replica
        self.others: Callable[[Node], Sequence[int]] = lambda node: ()  # parts of a replica on several machines
        self.ask: Callable[[Node, Event], None] = lambda node, event: None  # those parts for something
        self._shared: dict[int, Memory] = {}  # by the processes of a machine
        self.shards: list[ShardPhantom] = []
        self.arrived: dict[tuple[int, int], File] = {}  # snapshot, part -> the file that is there
        self.notes: list[Note] = []  # that are in the record
        self.together = 1  # notes that are written into it at once
        self.unwritten: Callable[[], Sequence[Note]] = lambda: ()
        self.published: list[PublishSnapshot] = []
        self.computed = first  # computations so far
        self.compute_s: Callable[[Node], float] = lambda node: COMPUTE_S * (1 + 0.37 * node.index)
        self.poison: Callable[[int, BatchRange], bool] = lambda number, batch: False
        self.steps_on: Callable[[int], int] | None = None  # on a batch, by loops that step several times
        self.leaves_out: Callable[[int], bool] = lambda number: False
        self.breaks: Callable[[int], bool] = lambda number: False
        self.factors: Callable[[int], Factors] = lambda number: ()
        self.disk: Callable[[int], str] = lambda number: ""
        self.copies_every = 0  # updates of a shard; 0: there are none
        self.logs = False  # the first replica is a script that measures all weights that it gets
        self.metrics: Callable[[], dict[str, float]] | None = None
        self.best: tuple[float, float] | None = None  # the loss that was told, and that of the weights that were kept
        self.prices: dict[type[Effect], Price] = {
            effects.Compute: lambda node, effect, begins: self.compute_s(node),
            **dict.fromkeys((effects.EvaluateModel, effects.WriteSnapshot), lambda node, effect, begins: COMPUTE_S),
        }

    def enter(self, world: World, seed: int) -> None:
        """The world of a life is there."""

    def new_memory(self) -> Memory:
        return Memory(self.recipe)

    def memory(self, node: Node) -> Memory:
        """The memory of a new process."""
        machine = self.machine(node)
        if not self.travels and machine not in self._shared:
            self._shared[machine] = self.new_memory()
        found = self.memories[node] = self.new_memory() if self.travels else self._shared[machine]
        return found

    def files(self, number: int) -> list[File]:
        """The files of a snapshot, by shard, as they are on the coordinator's machine."""
        return [self.arrived.get((number, shard.node.index), NOTHING) for shard in self.shards]

    def noted(self, kind: type[N]) -> list[N]:
        """The notes of a kind that the coordinator has made."""
        return [note for note in (*self.notes, *self.unwritten()) if isinstance(note, kind)]

    def host(self, node: Node, version: int = 0, file: File | None = None) -> Phantom:
        """A host for a new process. `version`, `file`: what a shard goes on from."""
        made = self.make(node, version, file)
        if node.role not in ("shard", "backup", "part"):
            made.memory.new_process(node.index)
        if isinstance(made, ShardPhantom):
            self.shards.append(made)
        return made

    def goes_on(self, shard: Node, before: ShardPhantom) -> ShardPhantom:
        """The host of a shard whose backup has had that one."""
        made = self.make(shard, before.version, None)
        assert isinstance(made, ShardPhantom)
        self.memories[shard] = made.memory = before.memory
        made.take_whole(before.whole())
        (place,) = (place for place, other in enumerate(self.shards) if other.node == shard)
        self.shards[place] = made
        return made

    def make(self, node: Node, version: int, file: File | None) -> Phantom:
        match node.role:
            case "coordinator":
                from squall.sim.proof.coordinator_phantom import CoordinatorPhantom  # which is one of these

                return CoordinatorPhantom(self, node)
            case "shard":
                return ShardPhantom(self, node, version, file)
            case "replica":
                return ReplicaPhantom(self, node)
            case "part":
                return PartPhantom(self, node)
        return EvaluatorPhantom(self, node)


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
            self.memory.gradients[slot, effect.buffer] = []
        if finite:
            basis = tuple(written.version for written in self.memory.weights[slot, self.active])
            gradient = Gradient(hosts.computed, *batch, basis, hosts.factors(hosts.computed), batch == self._stepped)
            self.memory.gradients[slot, effect.buffer].append(gradient)
            if hosts.steps_on is not None:
                self._batch, self._stepped = effect, batch
                self._steps = self._steps if again else hosts.steps_on(hosts.computed) - 1
        return events.GradientComputed(1.0, finite, seconds, hosts.factors(hosts.computed), over=hosts.steps_on is None)


class ShardPhantom(Phantom):
    def __init__(self, hosts: PhantomHosts, node: Node, version: int, file: File | None) -> None:
        super().__init__(hosts, node)
        self.applied = list(file.applied) if file is not None else []
        self.version, self.fold = version, file.fold if file is not None else 0
        self.files: dict[int, File] = {}  # by the snapshot's number
        self.copy = version, File(self.fold, tuple(self.applied))

    def torn(self, inside: Effect) -> int | None:
        """It was killed inside this. Returns the version of its copy, if it needs one."""
        self.fold, self.applied = -1, []
        return self.copy[0]

    def attach(self, payload: Payload) -> None:
        if payload.kind == "piece":
            number = payload.version
            self.memory.write(payload, (number, payload.clock, self.files[number]))
        if payload.kind not in ("weights", "trial"):
            return
        if self.hosts.memories[payload.owner] is self.memory:
            self.memory.check_free(payload, self.hosts.now())
        self.memory.write(payload, self.numbers(payload))

    @property
    def point(self) -> object:
        """How far it is."""
        return self.version

    def whole(self, waiting: Sequence[Payload] = ()) -> Any:
        """All that its backup is given, with these pushes."""
        pushes = [(each, tuple(self.memory.gradients[each.slot, each.buffer])) for each in waiting]
        return self.version, self.fold, tuple(self.applied), pushes

    def take_whole(self, whole: Any) -> None:
        self.version, self.fold, applied, pushes = whole
        self.applied = list(applied)
        self.copy = self.version, self.file()
        for payload, gradients in pushes:
            self.memory.gradients[payload.slot, payload.buffer] = list(gradients)

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
                for gradients, weight in found:
                    oldest = min((gradient.basis[self.node.index] for gradient in gradients), default=self.version)
                    self.applied.append(AppliedBuffer(gradients, self.version - oldest, weight))
                self.fold = folded(self.fold, found)
                self.version += 1
                if self.hosts.copies_every and self.version % self.hosts.copies_every == 0:
                    self.copy = self.version, File(self.fold, tuple(self.applied))
                    return events.CopyMade(self.version)
            case CopyTo(Node() as backup, _, _, state, waiting):
                self.memory.wholes[backup] = state, self.whole(waiting)
                return events.CopyKnown(backup, 1)
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
    """Of another part of a replica. It has computed what the first one has."""

    def attach(self, payload: Payload) -> None:
        whole = replace(payload, part=-1)
        self.memory.write(payload, self.hosts.memories[payload.owner].read(whole))

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
