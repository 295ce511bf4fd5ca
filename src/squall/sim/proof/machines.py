"""The machines of a chaotic run's life: their nurseries, what breaks between them, and what must hold of them.

Processes of a machine share a memory, between machines payloads travel. A connection that breaks loses what was under
way on it; of a payload half may be at its place already.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from heapq import heapify
from itertools import permutations
from typing import Any

from squall.protocol.closing import Phase
from squall.protocol.effects import Effect, KillMembers, StartMember
from squall.protocol.events import (
    Event,
    LauncherLost,
    LeaveRequested,
    MachineJoined,
    PeerReached,
    PeersHeard,
)
from squall.protocol.heartbeats import PATIENCE
from squall.protocol.link import Linked
from squall.protocol.nodes import COORDINATOR, NURSERY, Node, whole
from squall.protocol.nursery import NurseryMachine
from squall.protocol.policy import MachineRoom
from squall.protocol.speaking import hears
from squall.runtime.world import World
from squall.runtime.world_nodes import Clock, Parcel, Premises
from squall.sim.proof.activity import Looks, Waits
from squall.sim.proof.broken import Broken
from squall.sim.proof.chaos import Chaos
from squall.sim.proof.chaotic_machines import PULSE
from squall.sim.proof.faults import Jam, MachineComes, MachineGone, MachineLeaves, OfMachines, Partition, Role
from squall.sim.proof.faulty_wire import FaultyWire
from squall.sim.proof.machine_books import MachineBooks
from squall.sim.proof.phantom_hosts import PhantomHosts
from squall.sim.proof.spread import SpreadReplicas

APART_S = 300.0  # clocks of machines
HALVED = 0.8  # of the payloads that are under way as a connection breaks


class WorldMachines:
    """Of one life."""

    def __init__(
        self, chaos: Chaos, life: int, rooms: tuple[MachineRoom, ...], clocks: Mapping[Role, Clock]
    ) -> None:  # fmt: skip
        """`rooms` are those that the life begins on; `clocks` are of those whose clock is wrong."""
        self._clocks = clocks
        self._chance = random.Random(f"{chaos.seed} machines of life {life}")
        self._of = {node: room.machine for room in rooms for node in room.nodes}
        self.rooms = {room.machine: room.places for room in rooms} or {0: chaos.replicas * chaos.parts}
        self.gone: set[int] = set()
        self._leave: set[int] = set()
        self.silenced = False  # something has happened for which a machine may be taken for lost
        self.books = MachineBooks(chaos.replicas, chaos.parted, self.rooms, self._of if rooms else None)
        apart = {whole(node, chaos.parts) for node in self._of if node.role == "part"}
        self._apart, self._deputy = chaos.copies > 1, chaos.deputy
        self._seed, self._parts = chaos.seed + life, chaos.parts
        self._spread = SpreadReplicas(chaos.seed + life, chaos.parts, self.of, self.books.died, apart)

    def open(self, world: World, wire: FaultyWire, hosts: PhantomHosts) -> None:
        self._world, self._wire, self._hosts = world, wire, hosts
        self._spread.open(world, hosts, lambda one, other: wire.parted(one, other, world.now), self.gone)
        for machine in self.rooms:
            self._add_nursery(machine)
        self._waits, self._looks = Waits(world, self._parts), Looks(self._seed, world, self.of)

    def _add_nursery(self, machine: int) -> None:
        node = Node("nursery", machine)
        nursery = NurseryMachine(node, PULSE if machine else None)
        self._world.add(node, Linked(nursery), Premises(), home=node)

    def of(self, node: Node) -> int:
        return node.index if node.role == "nursery" else self._of.get(node, 0)

    def clock(self, node: Node) -> Clock | None:
        """With copies who was on one machine may go on on another, which began to count at another time."""
        found, machine = self._clocks.get(Role.of(node)), self.of(node)
        if not (self._apart and machine):
            return found
        found = found or Clock()
        return found._replace(offset_s=found.offset_s + (-1) ** machine * machine * APART_S)

    @property
    def home(self) -> Node:
        """The nursery of the coordinator's machine."""
        return Node("nursery", self.of(COORDINATOR))

    @property
    def led(self) -> bool:
        """The coordinator's machine is there, or others may yet go on without it."""
        if self.home in self._world.processes:
            return True
        able = (machine for machine in self.rooms if machine not in self.gone and self._cares(machine))
        return self._deputy and any(map(self.there, able))

    def _cares(self, machine: int) -> bool:
        """Its nursery has not ended."""
        nursery = self._world.processes.get(Node("nursery", machine))
        return nursery is not None and nursery.end is None

    def has(self, machine: int) -> bool:
        return Node("nursery", machine) in self._world.processes

    def there(self, machine: int) -> list[Node]:
        """Processes that go on, the nursery aside."""
        nursery = Node("nursery", machine)
        return [node for node, at in self._world.processes.items() if at.home == nursery != node and at.end is None]

    # ------------------------------------------------------------ faults

    def cause(self, fault: OfMachines) -> bool:
        """False where it comes to nothing."""
        if isinstance(fault, MachineComes) == self.has(fault.machine) or fault.machine in self.gone:
            return False
        match fault:
            case Partition():
                self.silenced = True
                self._part(fault)
            case Jam():
                self._wire.begin(fault, self._world.now)
                self._hear(fault.machine, self._world.now + fault.seconds)
            case MachineGone(_, machine):
                self.lose(machine)
            case MachineLeaves(_, machine):
                self._leave.add(machine)
                self._world.post(Node("nursery", machine), LeaveRequested("its user wants it back"))
            case MachineComes(_, machine, room):
                if self._deputy:  # it may be the last one
                    room = max(room, self._parts)
                self.rooms[machine] = room
                self._add_nursery(machine)
                self._world.post(self.home, MachineJoined(machine, room))
        return True

    def lose(self, machine: int) -> None:
        if not self.has(machine) or machine in self.gone:
            return
        self.silenced = True
        self.gone.add(machine)
        for node in (Node("nursery", machine), *self.there(machine)):
            self._world.kill(node)
        if machine == NURSERY.index and self._deputy:
            self._lose_launcher()

    def _hear(self, machine: int, until: float) -> None:
        """Something of the machine's processes comes to others elsewhere, as long as they are there."""
        others = [n for n in self._world.processes if n.role == "shard" and self.of(n) != machine]
        for hearer in (*others[:1], COORDINATOR):
            there = tuple(node for node in self.there(machine) if node.role != "evaluator" and hears(hearer, node))
            if there and not self._wire.parted(there[0], hearer, self._world.now):
                self._world.post(hearer, PeersHeard(there))
        if self._world.now < until:
            self._world.at(self._world.now + PULSE.every_s, lambda: self._hear(machine, until))

    def _part(self, fault: Partition) -> None:
        world, wire = self._world, self._wire
        wire.begin(fault, world.now)
        for to, parcel in lose_under_way(world, lambda one, other: fault.severs(self.of(one), self.of(other))):
            receiver = world.processes.get(to)
            if receiver is not None and self._chance.random() < HALVED:
                self.tear(receiver.linked, to, parcel)

        def healed() -> None:
            for one, other in permutations(list(world.processes), 2):
                if fault.severs(self.of(one), self.of(other)) and not wire.parted(one, other, world.now):
                    world.post(one, PeerReached(other))

        world.at(world.now + fault.seconds, healed)

    def tear(self, linked: object, to: Node, parcel: tuple[Node, Parcel]) -> None:
        """Half of the payload is at its place."""
        sender, (frame, payload, numbers) = parcel
        if to == COORDINATOR and payload.kind == "weights":
            return  # whole ones alone are put where they are read
        if isinstance(linked, Linked) and linked.takes(sender, frame.number):
            self._hosts.memories[to].tear(payload, numbers)

    # ------------------------------------------------------------ what must hold

    def watch(self, node: Node, what: Event | Effect) -> None:
        if isinstance(what, KillMembers):  # it has heard nothing of a coordinator that stood still, say
            self.silenced = True
        if isinstance(what, StartMember):
            self._of[what.node] = node.index
            self._spread.watch(node, what)
            taken, takes = sum(map(self._spread.takes, self.there(node.index))), self._spread.takes(what.node)
            if takes and taken + takes > self.rooms[node.index]:
                raise Broken("I10", f"{what.node} starts on machine {node.index}, which is full with {taken}")
        else:
            self._spread.watch(node, what)
        if isinstance(what, Event) and self.books.told_ended is not None:
            machine, self.books.told_ended = self.books.told_ended, None
            if there := self.there(machine):
                raise Broken("I11", f"machine {machine} knows that it was replaced, and {there[0]} goes on")
        if node == COORDINATOR and self.home != NURSERY:  # a deputy that nobody follows stops the run as it leads
            coordinator: Any = self._world.processes.get(COORDINATOR)
            self.books.over |= coordinator is not None and coordinator.linked.machine.phase is not Phase.RUNNING
        self.books.watch(node, what)

    def watch_shown(self, node: Node, what: Event | Effect) -> None:
        """Asked last: what else is wrong is told by its own name."""
        self._waits.watch(node, what)
        self._looks.watch(what)

    @property
    def stay(self) -> dict[int, int]:
        """Machines that a run which moves goes on with, and their room; none where not the first one leads any more.

        Who has its new directory resumes it there, which is another run with as many machines as at first.
        """
        out = self.gone | self._leave | self.books.died.keys()
        return {m: room for m, room in self.rooms.items() if m not in out and NURSERY.index not in out}

    def outlive(self, healed_s: float) -> None:
        """The coordinator has ended, and nobody is left to tell machines that were replaced: they end by themselves."""
        died = [machine for machine in self.books.died if self.there(machine)]
        for machine, node in self._outlast(died, healed_s + OUTLIVES_S):
            raise Broken("I11", f"machine {machine} was replaced, and {node} goes on after the run's end")

    def orphan(self, healed_s: float) -> None:
        """The first machine is gone, with the launching process, whose connections to the others close at once."""
        others = self._lose_launcher()
        stay = [machine for machine in others if machine not in self._leave]  # with others its nursery has ended
        for machine, node in self._outlast(stay, healed_s + ORPHANED_S):
            raise Broken("I14", f"{node} on machine {machine} goes on without the first machine")

    def _lose_launcher(self) -> list[int]:
        """Returns the machines that are there yet."""
        others = [machine for machine in self.rooms if machine and self.has(machine) and machine not in self.gone]
        for machine in others:
            self._world.post(Node("nursery", machine), LauncherLost())
        return others

    def _outlast(self, machines: list[int], until: float) -> list[tuple[int, Node]]:
        """What still runs on these when that time has come, and no coordinator is there."""
        world = self._world
        if machines:
            world.processes.pop(COORDINATOR, None)
        while (world._queue or world._heads) and world.now < until and any(map(self.there, machines)):
            world.step()
        return [(machine, node) for machine in machines for node in self.there(machine)]


# A slow clock may run at half the speed.
OUTLIVES_S = 2 * PATIENCE * PULSE.lost_after_s + 10
ORPHANED_S = 2 * PULSE.lost_after_s + 2


def lose_under_way(world: World, severed: Callable[[Node, Node], bool]) -> list[tuple[Node, tuple[Node, Parcel]]]:
    """Take what is under way between nodes from a world's queues. Returns the payloads: to whom, from whom, what."""
    lost: list[tuple[Node, tuple[Node, Parcel]]] = []

    def stays(to: Node, sender: Node | None, what: object) -> bool:
        if sender is None or not severed(sender, to):
            return True
        if isinstance(what, Parcel):
            lost.append((to, (sender, what)))
        return False

    world._queue[:] = [entry for entry in world._queue if stays(entry[2].node, entry[3], entry[4])]
    heapify(world._queue)
    streams = [head[5] for head in world._heads]
    for stream in streams:
        kept = [entry for entry in stream if stays(entry[2].node, entry[3], entry[4])]
        stream.clear()
        stream.extend(kept)
    world._heads[:] = [stream[0] for stream in streams if stream]
    heapify(world._heads)
    return lost
