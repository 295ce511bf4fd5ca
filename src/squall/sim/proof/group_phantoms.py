"""Hosts without numbers for all-reduce: what is in a member's weights is the list of the rounds that moved them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from squall.protocol import effects, events
from squall.protocol.effects import Effect, JoinGroup, Payload, Step
from squall.protocol.events import Event
from squall.protocol.messages import PIECE_BYTES
from squall.protocol.nodes import COORDINATOR, Node
from squall.runtime.circle import Circle, Work, joined_whole
from squall.runtime.world import World
from squall.sim.proof.broken import Broken
from squall.sim.proof.coordinator_phantom import CoordinatorPhantom
from squall.sim.proof.memory import BatchRange, File, Written, folded_with
from squall.sim.proof.phantom_hosts import PhantomHosts
from squall.sim.proof.phantoms import COMPUTE_S, NOTHING, PIECES, Phantom

LATE_S = 0.004  # that one member has made a step behind another, at most


class Part(NamedTuple):
    """What a member brings to a step."""

    fold: int  # of the weights that it has computed on
    batch: BatchRange | None  # one that its loop has left out has had its turn, too
    finite: bool


class Weights(NamedTuple):
    """A member's: how many rounds have moved them, with which batches, as a fold and one by one."""

    clock: int = 0
    fold: int = 0
    batches: tuple[BatchRange, ...] = ()

    @property
    def examples(self) -> int:
        return sum(stop - start for _, start, stop in self.batches)


Share = Mapping[int, tuple[Weights, Weights | None]]  # parameter -> the rounds of its weights, and of its state


class GroupPhantomHosts(PhantomHosts):
    """Of a run of all-reduce."""

    circle: Circle
    kind: type[MemberPhantom]
    begun: Weights  # that all begin with

    def enter(self, world: World, seed: int) -> None:
        chance = random.Random(seed)

        def delays(nodes: Sequence[Node], effect: Work) -> list[float]:
            return [chance.uniform(0.0, LATE_S) for _ in nodes]

        self.circle = Circle(world, delays, between=self)
        self.members: dict[Node, MemberPhantom] = {}
        self.written: dict[int, Weights] = {}  # snapshot -> the weights that its files hold
        self.saved: dict[int, dict[int, tuple[Node, File]]] = {}  # alike, by part: who has written it, and what
        self.parts: dict[int, dict[int, Share]] = {}  # alike, where each writes its share
        self.shown: Weights | None = None  # what was put into the evaluator's buffer last
        self.post = world.post
        self.under_way: dict[tuple[int, int], Weights] = {}  # evaluation, and clock -> what was sent there for it
        self.prices[Step] = lambda node, effect, begins: self.compute_s(node)

    def show(self, weights: Weights) -> None:
        """Put them where the evaluator, which is on the first machine, reads."""
        evaluator, memory = Node("evaluator", self.recipe.replicas), self.memories[COORDINATOR]
        memory.check_free(Payload("weights", evaluator, 0, 0, 0), self.now())
        memory.weights[evaluator.index, 0] = [Written(weights.clock, weights.fold)]
        self.shown = weights

    def parted(self, nodes: Sequence[Node]) -> bool:
        return any(map(self.waits, nodes)) or any(self.cut_off(one, other) for one, other in combinations(nodes, 2))

    def silent(self, node: Node) -> bool:
        return self.gone(self.machine(node))

    def make(self, node: Node, version: int, file: File | None) -> Phantom:
        if node.role == "replica":
            made = self.members[node] = self.kind(self, node)
            made.begin(self.begun)
            return made
        return GroupCoordinatorPhantom(self, node) if node == COORDINATOR else super().make(node, version, file)

    def files(self, number: int) -> list[File]:
        return [
            self.arrived.get((number, part), NOTHING) if self.machine(node) else file
            for part, (node, file) in sorted(self.saved[number].items())
        ]


class GroupCoordinatorPhantom(CoordinatorPhantom):
    hosts: GroupPhantomHosts

    def __init__(self, hosts: GroupPhantomHosts, node: Node) -> None:
        super().__init__(hosts, node)
        self._shown: dict[tuple[int, int], Weights] = {}  # evaluation, and clock -> what was shown for it

    def incoming(self, payload: Payload, numbers: Any) -> None:
        if payload.kind == "piece":
            super().incoming(payload, numbers)
        else:
            self._shown[payload.clock, payload.version] = numbers

    def attach(self, payload: Payload) -> None:
        shown = self._shown.get((payload.clock, payload.version))
        if shown is not None:
            self.hosts.show(shown)


class MemberPhantom(Phantom):
    hosts: GroupPhantomHosts

    def __init__(self, hosts: GroupPhantomHosts, node: Node) -> None:
        super().__init__(hosts, node)
        self._number = 0  # of the group
        self._left = False  # its loop takes no more batches
        self._left_out: BatchRange | None = None  # of the round under way, by its loop

    def begin(self, weights: Weights) -> None:
        self.weights = weights

    def attach(self, payload: Payload) -> None:
        if payload.kind == "piece":
            file = next(file for node, file in self.hosts.saved[payload.version].values() if node == self.node)
            self.memory.write(payload, (payload.version, payload.clock, file))
            return
        if self.hosts.machine(self.node):
            self.hosts.under_way[payload.clock, payload.version] = self.weights
        else:
            self.hosts.show(self.weights)

    def outgoing(self, payload: Payload, to: Node) -> object | None:
        if payload.kind == "piece":
            return super().outgoing(payload, to)
        return self.hosts.under_way.get((payload.clock, payload.version))

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case JoinGroup(number):
                self._number = number
                self.hosts.circle.join(self.node, effect, self)
            case Step():
                return self._step(effect)
            case effects.Gather():
                self.hosts.circle.gather(self.node, effect)
            case effects.CutGroup():
                self.hosts.circle.cut(self.node)
            case effects.LeaveGroup() | effects.End():
                self._left_out = None
                self.hosts.circle.leave(self.node)
            case effects.WriteSnapshot(number):
                checksum = self.save(number, 0)
                size = PIECES * PIECE_BYTES if self.hosts.machine(self.node) else 0
                return events.SnapshotWritten(number, self.hosts.disk(number), checksum, size)
        return None

    def save(self, number: int, part: int) -> int:
        """The checksum of its file."""
        file = File(folded_with(self.weights.fold, (part,)))
        self.hosts.written[number] = self.weights
        self.hosts.saved.setdefault(number, {})[part] = self.node, file
        return file.checksum

    def _step(self, effect: Step) -> Event | None:
        hosts = self.hosts
        hosts.computed += 1
        batch = (effect.epoch, effect.start, effect.stop) if effect.start < effect.stop else None
        finite = batch is None or not hosts.poison(hosts.computed, batch)
        if batch is not None and hosts.logs:  # by a script
            if self.node.index == 0:
                hosts.post(self.node, events.ValuesLogged({"logged": 1.0}))
            if self._left or hosts.breaks(hosts.computed):
                self._left = True
                return events.GroupBroken(self._number, "a script takes no more batches")
            if hosts.leaves_out(hosts.computed):
                self._left_out = batch
                return events.BatchSkipped()
        hosts.circle.step(self.node, effect, Part(self.weights.fold, batch or self._left_out, finite))
        return None

    def reduced(self, effect: Step, parts: Mapping[Node, Part]) -> Event:
        own = parts[self.node]
        if any(part.fold != own.fold for part in parts.values()):
            raise Broken("I6", f"{self.node} and others of its group step on other weights")
        finite = all(part.finite for part in parts.values())
        if finite:
            batches = tuple(part.batch for part in parts.values() if part.batch is not None)
            fold = folded_with(self.weights.fold, tuple(value for batch in batches for value in batch))
            self.weights = Weights(effect.clock, fold, self.weights.batches + batches)
            self._left_out = None
        return events.StepTaken(self._number, 1.0, finite, COMPUTE_S, 0.0, guilty=not own.finite)

    def joined(self, form: JoinGroup, members: Mapping[Node, MemberPhantom]) -> Event:
        return joined_whole(self, self.node, form, members)

    def gathered(self, form: JoinGroup, members: Mapping[Node, MemberPhantom]) -> Event:
        raise AssertionError("all have the whole state")

    def state(self) -> Weights:
        return self.weights

    def take_up(self, state: Weights, clock: int) -> None:
        if state.clock != clock:
            raise Broken("I6", f"{self.node} gets weights of round {state.clock}, and was told of {clock}")
        self.weights = state
