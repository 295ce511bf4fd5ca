"""What people are shown of a life's processes must be true (I19): whom each waits for, and what machines tell of them.

Nothing else in a world depends on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from squall.protocol.effects import Admit, Compute, Effect, Transmit
from squall.protocol.events import ActivitySeen, Event, FrameArrived
from squall.protocol.link import Linked
from squall.protocol.messages import Exchanged, Grant
from squall.protocol.nodes import COORDINATOR, Node, whole
from squall.protocol.notes import ActivityTold
from squall.protocol.nursery_messages import Spent
from squall.runtime.world import World
from squall.sim.proof.broken import Broken

LOOKED_AT = 0.3  # of the worlds have nurseries that look at what their processes do
LOOK_EVERY_S = 0.05
ROUNDING_S = 1e-9
BOASTS = 0.2  # of the looks name a process of another machine as well


class Waits:
    """Who is named as awaited is who lets the machine go on, or lets it answer those whom it has held back."""

    def __init__(self, world: World, parts: int) -> None:
        self._world, self._parts = world, parts
        self._named: Node | None = None  # by the machine that takes this event
        self._from: Node | None = None  # whom the event comes from

    def watch(self, node: Node, what: Event | Effect) -> None:
        match what:
            case FrameArrived(sender, frame) if sender != COORDINATOR or isinstance(frame.message, Grant):
                self._from, self._named = whole(sender, self._parts), self._names(node)
            case Event():
                self._named = None
            case Compute() | Transmit(again=False) if self._named not in (None, self._from) and self._goes_on(what):
                raise Broken("I19", f"{node} has named {self._named}, and {self._from} lets it go on")

    def _names(self, node: Node) -> Node | None:
        process = self._world.processes.get(node)
        linked = process.linked if process is not None else None
        return linked.awaits() if isinstance(linked, Linked) and linked.held else None

    def _goes_on(self, what: Effect) -> bool:
        if isinstance(what, Transmit):
            return isinstance(what.frame.message, Exchanged) and what.to != self._from
        return isinstance(what, Compute)


class Looks:
    """Nurseries look at their processes; the coordinator tells of a machine's own alone, and of each second once."""

    def __init__(self, seed: int, world: World, machine: Callable[[Node], int]) -> None:
        """`machine` says where a node is."""
        self._chance = random.Random(f"{seed} looks")  # of its own: all else of a seed's world stays as it was
        self._world, self._machine = world, machine
        self._seen: dict[tuple[Node, int], float] = {}  # on that machine, until when
        self._placed: dict[Node, int] = {}  # where the coordinator has processes started
        self._told: dict[tuple[Node, int], float] = {}  # seconds there
        self._boasted: dict[tuple[Node, int], float] = {}  # those that the machine has made up: it may be there since
        if self._chance.random() < LOOKED_AT:
            self._look_again()

    def _look_again(self) -> None:
        self._world.at(self._world.now + LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        processes = self._world.processes
        there: dict[int, list[Node]] = {node.index: [] for node in processes if node.role == "nursery"}
        for node, process in processes.items():
            if node.role != "nursery" and process.end is None and self._machine(node) in there:
                there[self._machine(node)].append(node)
        for machine, nodes in there.items():
            boasts = self._chance.random() < BOASTS
            elsewhere = [node for other, found in there.items() if other != machine for node in found]
            strangers = [node for node in elsewhere if boasts and node != COORDINATOR][:1]
            for node in strangers:
                self._boasted[node, machine] = self._boasted.get((node, machine), 0.0) + LOOK_EVERY_S
            seen = (*map(self._spent, nodes), *(Spent(node, LOOK_EVERY_S) for node in strangers))
            self._world.post(Node("nursery", machine), ActivitySeen(seen))
        self._look_again()

    def _spent(self, node: Node) -> Spent:
        now, key = self._world.now, (node, self._machine(node))
        since, self._seen[key] = self._seen.get(key, now), now
        return Spent(node, now - since)

    def watch(self, what: Event | Effect) -> None:
        if isinstance(what, Admit):
            self._placed[what.node] = what.machine
        if not isinstance(what, ActivityTold):
            return
        for spent in what.spent:
            node, at = spent.node, self._machine(spent.node)
            if (node, what.machine) in self._seen:  # it was there: what is told may have waited for a deputy
                at = what.machine
            elif self._placed.get(node) == what.machine:  # it is to be there
                continue
            if at != what.machine:
                raise Broken("I19", f"{node} is on machine {at}, and machine {what.machine} is believed")
            told = self._told[node, at] = self._told.get((node, at), 0.0) + spent.seconds
            seen = self._seen.get((node, at), 0.0)
            if told > seen + self._boasted.get((node, at), 0.0) + ROUNDING_S:
                raise Broken("I19", f"{node} has spent {told:.3f} s by {seen:.3f} s")
