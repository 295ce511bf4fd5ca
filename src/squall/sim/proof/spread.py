"""Replicas of a chaotic world that lie on several machines: their other parts, and what must hold of them.

What a replica computes takes until all of its parts are there, can be reached, and have the weights that it has; and a
step of all-reduce until all parts of all members are there. Where the connection of a part breaks, who was at its other
end mostly notices and dies.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Container
from functools import partial

from squall.protocol.effects import (
    Compute,
    Effect,
    End,
    Forget,
    JoinGroup,
    MeetParts,
    Payload,
    StartMember,
    Transmit,
    UseWeights,
)
from squall.protocol.events import Event, GradientComputed
from squall.protocol.link import Linked
from squall.protocol.machine import Machine
from squall.protocol.nodes import Node, part_nodes, whole
from squall.runtime.world import World
from squall.sim.proof.broken import Broken
from squall.sim.proof.phantom_hosts import PhantomHosts

NOTICED = 0.6  # of the deaths
NOTICE_S, LOOK_EVERY_S = 0.002, 0.01


class Follower:
    """The machine of a part of all-reduce: it does what the first part says, which is not in this world."""

    wake_at: float | None = None

    def __init__(self, node: Node) -> None:
        self.node = node

    def on(self, event: Event, now: float) -> list[Effect]:
        return []


class FirstPart(Linked):
    """A replica that lies on several machines: what it does behind these effects waits until its parts are with it."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._behind: list[Effect] = []

    @property
    def wake_at(self) -> float | None:
        return -math.inf if self._behind else super().wake_at

    @property
    def held(self) -> bool:
        return not self._behind and super().held

    def on(self, event: Event, now: float) -> list[Effect]:
        effects, self._behind = self._behind + super().on(event, now), []
        for number, effect in enumerate(effects, start=1):
            if isinstance(effect, MeetParts | UseWeights):
                effects, self._behind = effects[:number], effects[number:]
                break
        return effects


class SpreadReplicas:
    """Of one life. `apart` are those that begin."""

    def __init__(
        self, seed: int, parts: int, machine: Callable[[Node], int], lost: Container[int], apart: set[Node]
    ) -> None:  # fmt: skip
        """`machine` says where a node is; those that are `lost` are so for the coordinator."""
        self._chance = random.Random(f"{seed} spread")
        self._count = parts
        self._machine, self._lost = machine, lost
        self._apart = set(apart)
        self._met: dict[Node, dict[Node, int]] = {}  # replica -> its other parts, and where it was told they are
        self._killed: dict[Node, float] = {}  # and when
        self._computing: set[Node] = set()
        self._waiting: set[Node] = set()
        self._sent: dict[tuple[Node, Node], int] = {}  # shard, part -> clock of the last weights
        self._refused: set[tuple[Node, Node]] = set()  # by a shard, which sends it nothing more
        self._used: defaultdict[Node, list[object]] = defaultdict(list)  # weights, each time that it took some into use

    def open(
        self, world: World, hosts: PhantomHosts, parted: Callable[[Node, Node], bool], gone: Container[int]
    ) -> None:  # fmt: skip
        """`parted`: whether two processes' machines are cut off from each other; `gone`: machines, without a word."""
        self._world, self._hosts, self._parted, self._gone = world, hosts, parted, gone
        world.on_kill.append(self._on_killed)
        hosts.waits, hosts.ask = self.waits, self._ask
        hosts.others = lambda node: range(1, self._count) if node in self._apart else ()

    def _ask(self, replica: Node, event: Event) -> None:
        """The first part has the others do something, when it reaches them."""
        for part in self._met[replica]:
            self._tell(replica, part, event)

    def _tell(self, replica: Node, part: Node, event: Event) -> None:
        if self._parted(replica, part):
            self._world.at(self._world.now + LOOK_EVERY_S, lambda: self._tell(replica, part, event))
        elif replica in self._world.processes and part in self._world.processes:
            self._world.post(part, event)

    def takes(self, node: Node) -> int:
        """Places of its machine's room."""
        if node.role == "replica":
            return 1 if node in self._apart else self._count
        return int(node.role == "part")

    def watch(self, node: Node, what: Event | Effect) -> None:
        match what:
            case StartMember(started, first) if first is not None:
                if started == first.node:
                    self._apart.add(started)
                if node.index not in self._lost:
                    self._on_started(started, first.node, first.machine)
            case MeetParts(places) if node in self._apart:
                self._met[node] = {place.node: place.machine for place in places}
                if tuple(self._met[node]) != part_nodes(node, self._count):
                    raise Broken("I16", f"{node} is told of other parts than its own: {[*map(str, self._met[node])]}")
                self._wait(node)
            case Compute() | JoinGroup() if node in self._apart and node not in self._met:
                raise Broken("I16", f"{node} is at work before it has met its parts")
            case Compute() if node in self._apart:
                self._computing.add(node)
                self._wait(node)
            case Transmit(to, _, Payload(kind="weights" | "trial") as payload) if node.role == "shard":
                self._on_sent(node, to, payload.clock)
            case Forget(part) if part.role == "part":
                self._refused.add((node, part))
            case UseWeights(buffer):
                self._used[node].append(self._weights(node, buffer))
                if node in self._apart:  # a loop may step on its batch again, at once
                    self._computing.add(node)
                    self._wait(node)
            case GradientComputed() if node in self._apart:
                self._computing.discard(node)
                lacking = self._lacking(node)
                if lacking is None:
                    self._check_weights(node)
                elif self._killed.get(lacking) != self._world.now:  # else it was over before
                    raise Broken("I16", f"{node} has computed without {lacking}")
            case End() if node in self._apart:
                self._told_to_end(node)

    def _on_started(self, node: Node, replica: Node, machine: int) -> None:
        for other in self._world.processes:
            mine = whole(other, self._count)
            earlier = mine.role == "replica" and mine.index == replica.index and mine != replica
            if earlier and self._goes_on(other) and self._machine(other) not in self._lost:
                raise Broken("I16", f"{node} starts while {other} still goes on")
        if whole(node, self._count) != replica or self._machine(replica) != machine:
            raise Broken("I16", f"{node} is to call {replica} on machine {machine}")

    def _lacking(self, replica: Node) -> Node | None:
        """A part that is not where the replica was told, or not there at all."""
        processes = self._world.processes
        told = self._met[replica].items()
        return next((part for part, at in told if part not in processes or self._machine(part) != at), None)

    def _on_sent(self, shard: Node, to: Node, clock: int) -> None:
        """Parts have their weights first: who has an answer may move what lies beside them."""
        if to.role == "part":
            self._sent[shard, to] = clock
        for part in part_nodes(to, self._count) if to in self._apart else ():
            if self._sent.get((shard, part)) != clock and (shard, part) not in self._refused:
                raise Broken("I16", f"{shard} answers {to}, and has sent {part} no weights")

    def _check_weights(self, replica: Node) -> None:
        """All parts have computed on the same ones."""
        times = len(self._used[replica])  # parts may have taken those into use already that come next
        for part in self._met[replica]:
            if self._used[part][:times] != self._used[replica]:
                raise Broken("I16", f"{replica} has computed on weights that {part} did not have")

    def _weights(self, node: Node, buffer: int) -> list[object]:
        owner, part = whole(node, self._count), node.index % self._count if node.role == "part" else -1
        payloads = [Payload("weights", owner, buffer, 0, s.node.index, part=part) for s in self._hosts.shards]
        return [self._hosts.memories[node].read(payload) for payload in payloads]

    def waits(self, replica: Node) -> bool:
        """Whether a part of it is not there, stands still, or does not have its weights."""
        met = self._met.get(replica)
        return met is not None and (
            self._lacking(replica) is not None
            or any(self._stands_still(part, replica) or self._lags(part, replica) for part in met)
        )

    def _lags(self, part: Node, replica: Node) -> bool:
        return len(self._used[part]) < len(self._used[replica])

    def _wait(self, replica: Node) -> None:
        """Until all parts are there, and go on."""
        world = self._world
        if self._goes_on(replica) and self.waits(replica):
            world.prolong(replica, world.now + 2 * LOOK_EVERY_S)
            if replica not in self._waiting:
                self._waiting.add(replica)
                world.at(world.now + LOOK_EVERY_S, lambda: self._look_again(replica))

    def _stands_still(self, part: Node, replica: Node) -> bool:
        process = self._world.processes.get(part)
        paused = process is not None and process.busy_until > self._world.now
        return paused or self._parted(part, replica)

    def _look_again(self, replica: Node) -> None:
        self._waiting.discard(replica)
        self._wait(replica)

    def _on_killed(self, node: Node) -> None:
        self._killed[node] = self._world.now
        replica = whole(node, self._count)
        if replica not in self._apart:
            return
        for other in (replica, *part_nodes(replica, self._count)):
            if other == node or self._machine(node) in self._gone or self._parted(node, other):
                continue
            if self._chance.random() < NOTICED:
                self._world.at(self._world.now + NOTICE_S, partial(self._die, other))
        if replica in self._computing:
            self._wait(replica)

    def _die(self, node: Node) -> None:
        if self._goes_on(node):
            self._world.kill(node, "one of its parts was lost")

    def _goes_on(self, node: Node) -> bool:
        return node in self._world.processes and self._world.processes[node].end is None

    def _told_to_end(self, replica: Node) -> None:
        for part in part_nodes(replica, self._count):
            process = self._world.processes.get(part)
            if process is not None and not self._parted(part, replica):
                process.end = End("finished")
