"""Worlds in which shards have backups: which there are, what backups work on, and what must hold of them (I23, I24)."""

from __future__ import annotations

import dataclasses
import math
import pickle
import random
from collections.abc import Callable

from squall.protocol.backup import TakeCopy
from squall.protocol.copied import Copied
from squall.protocol.effects import (
    AddPortions,
    Admit,
    Apply,
    CalculateVectors,
    Effect,
    End,
    Payload,
    StartMember,
    Transmit,
)
from squall.protocol.events import CopyTaken, Event, PeerReached, ProcessEnded, VectorsCalculated
from squall.protocol.frames import Frame
from squall.protocol.messages import Exchanged
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.nursery_messages import PartPlace
from squall.runtime.placement import ONE_PART
from squall.runtime.world import World
from squall.sim.proof import chaotic_machines as several
from squall.sim.proof.batch_phantoms import BatchPhantomHosts, VectorPhantom
from squall.sim.proof.broken import Broken
from squall.sim.proof.chaos import STRATEGIES, Chaos, chaos
from squall.sim.proof.chaotic_machines import LIES
from squall.sim.proof.faults import Fault, Kill, Lie, MachineGone, OfMachines, Partition, Pause, Role, Tear
from squall.sim.proof.machines import lose_under_way
from squall.sim.proof.mortal import Mortal, MortalJournal
from squall.sim.proof.phantom_hosts import PhantomHosts
from squall.sim.proof.phantoms import ShardPhantom
from squall.strategies.work import BatchMethod, Loop

CHANGES = (Apply, CalculateVectors, AddPortions)  # of numbers
MACHINES = (1, 2, 3, 3)  # of a world, equally likely each


def backed(seed: int) -> Chaos:
    """World `seed`, or one like it, with two copies of each shard."""
    world, chance = chaos(seed), random.Random(f"{seed} backed")
    strategy = chance.choice([name for name in STRATEGIES if _loops(name)])
    if _loops(world.strategy) or isinstance(world.recipe.work, BatchMethod):
        strategy = world.strategy
    shards, machines = max(1, world.shards), chance.choice(MACHINES)
    events = 60 + 8 * (world.examples // world.batch_size) * world.epochs * (shards + 2)
    faults: list[Fault] = [each for each in world.faults if not isinstance(each, OfMachines | Tear)]
    faults = [each for each in faults if not _of_machine(each)]
    faults += several.machine_faults(seed, machines, events)
    parts = several.parts_of(seed) if machines > 1 else ONE_PART
    faults += several.part_faults(seed, parts, world.replicas, events)
    for _ in range(chance.choice((0, 0, 1, 2))):
        backup, at = Role("backup", chance.randrange(shards)), chance.randrange(events)
        faults.append(Kill(at, backup) if chance.random() < 0.7 else Pause(at, chance.uniform(0.05, 2.0), backup))
    lie = random.Random(f"{seed} lie of a backup")  # of its own: all else of a seed's world stays as it was
    if machines > 1 and lie.random() < LIES:
        faults.append(Lie(lie.randrange(events), Role("backup", lie.randrange(shards))))
    if machines > 1 and chance.random() < 0.6:
        faults.append(MachineGone(chance.randrange(events), chance.randrange(1, machines)))
    return dataclasses.replace(
        world, strategy=strategy, shards=shards, machines=machines, copies=2, parts=parts.number,
        spread_parts=parts.spread, loaders=0, faults=tuple(sorted(faults, key=lambda fault: getattr(fault, "at", 0))),
    )  # fmt: skip


def deputed(seed: int) -> Chaos:
    """World `seed` with copies, or one like it, on several machines, and with a deputy of the coordinator.

    No scripts, as they have no deputy: what they say goes through the first machine.
    """
    chance, machines = random.Random(f"{seed} deputy"), random.Random(f"{seed} deputies").choice((2, 3, 3, 4))
    world = backed(seed)
    machines = max(machines, world.machines)
    events = 60 + 8 * (world.examples // world.batch_size) * world.epochs * (world.shards + 2)
    found = [_of_the_coordinators_machine(chance, machines, chance.randrange(events)) for _ in range(2)]
    lie = random.Random(f"{seed} lie of a deputy")
    found += [Lie(lie.randrange(events), Role("deputy"))] if lie.random() < LIES else []
    faults = tuple(sorted((*world.faults, *found), key=lambda fault: getattr(fault, "at", 0)))
    return dataclasses.replace(world, machines=machines, scripted=False, deputy=True, faults=faults)


def _of_the_coordinators_machine(chance: random.Random, machines: int, at: int) -> Fault:
    """Or of the deputy."""
    seconds = chance.choice((1.0, 5.0, 20.0, 70.0)) * chance.uniform(0.5, 1.0)
    match chance.randrange(6):
        case 0 | 1:
            return Kill(at, Role("nursery", 0))
        case 2:
            return Partition(at, seconds, 0, None)
        case 3:
            return Partition(at, seconds, 0, chance.randrange(1, machines))
        case 4:
            return Kill(at, Role("deputy"))
    return Pause(at, seconds / 5, Role("deputy"))


def _loops(name: str) -> bool:
    """Batch by batch, and there may be backups."""
    return isinstance(STRATEGIES[name](2, 1).recipe().work, Loop)


def _of_machine(fault: Fault) -> bool:
    """It is of another machine than the first, or of parts, of which there may be others."""
    role = getattr(fault, "part", None)
    return getattr(fault, "machine", 0) > 0 or (
        role is not None and (role.role == "part" or (role.role == "nursery" and role.index > 0))
    )


class MortalCopied(Mortal, Copied):
    """A shard that has a backup."""


class Backing(ShardPhantom):
    """A backup's host: of a shard's kind, and with nothing yet."""

    journal: MortalJournal
    taken = False
    has: set[str]  # pieces
    made: list[tuple[object, Effect]]  # changes of numbers, each with how far it was before

    @classmethod
    def of(cls, hosts: PhantomHosts, node: Node) -> Backing:
        found: Backing = BackupPhantom(hosts, node, 0, None)
        if isinstance(hosts, BatchPhantomHosts):
            found = VectorBackup(hosts, node, None)
        found.journal, found.made, found.has = MortalJournal(), [], set()
        return found

    def attach(self, payload: Payload) -> None:
        """Weights lie where replicas of another machine will not look."""
        self.delivered(payload)

    def perform(self, effect: Effect, now: float) -> Event | None:
        if not isinstance(effect, TakeCopy):
            self.made += [(self.point, effect)] if isinstance(effect, CHANGES) else []
            event = super().perform(effect, now)
            return event if isinstance(event, VectorsCalculated) else None
        part = self.memory.wholes.pop((self.node, effect.payload.clock))
        if self.taken:
            piece, numbers = part
            self.has.add(piece)
            setattr(self, piece, numbers)
            return CopyTaken(None, self.has == set(self.pieces))
        state, whole = part
        self.take_whole(whole)
        for piece in self.pieces:  # it has none of these yet
            setattr(self, piece, type(getattr(self, piece))())
        self.taken = True
        copied: Copied = pickle.loads(state)
        copied.journal_into(self.journal)
        return CopyTaken(copied, not self.pieces)


class BackupPhantom(Backing, ShardPhantom):
    """Of updates."""


class VectorBackup(Backing, VectorPhantom):
    """Of vectors."""


class Backups:
    """Of one life."""

    def __init__(self, several: bool) -> None:
        """`several`: there are other machines, to which shards move."""
        self._several = several
        self._hosts: dict[Node, Backing] = {}
        self._moved: dict[Node, int] = {}  # shards that are to go on elsewhere, and their machines
        self._there: set[Node] = set()  # those of them whose process there has started
        self._told: set[tuple[Node, int, Node]] = set()  # the same, and who has been told of it
        self._strays: list[Node] = []  # shards of which another process starts
        self._ends: dict[Node, Node] = {}  # shards that start, and the backups in whose places they go on

    def begin(self, hosts: PhantomHosts, node: Node) -> Backing:
        found = self._hosts[node] = Backing.of(hosts, node)
        return found

    def cut(self, sender: Node, to: Node) -> bool:
        """They do not reach each other: one is a shard's process on a machine where the other does not call it.

        It may be the one that was cut off, or the one that goes on.
        """
        for shard, other in ((sender, to), (to, sender)):
            if shard in self._moved and other.role != "nursery":
                knows = other == COORDINATOR or (shard, self._moved[shard], other) in self._told
                return knows != (shard in self._there)
        return False

    def strays(self, nursery: Node, what: object) -> bool:
        """It starts another process of a shard that goes on elsewhere: nobody calls it, and it is in no world."""
        match what:
            case StartMember(shard, ends=None) if shard in self._there and self._moved[shard] != nursery.index:
                self._strays.append(shard)
                return True
        return False

    def strayed(self, shard: Node) -> bool:
        """Once for each."""
        found = shard in self._strays
        if found:
            self._strays.remove(shard)
        return found

    def clear(self, world: World, shard: Node) -> None:
        """If it goes on in its backup's place: there may be another on a machine that was cut off, and calls to it."""
        if shard in self._ends:
            world.kill(shard, notice_s=math.inf)
            lose_under_way(world, lambda sender, to: shard in (sender, to))

    def led(self, machine: Callable[[Node], int]) -> None:
        """Another coordinator leads, and does not know of shards that the one before was to move.

        `machine`: of a node.
        """
        for shard in self._moved.keys() - self._there:
            del self._moved[shard]
            if any((shard, machine(shard)) == told[:2] for told in self._told):  # it had been moved there before
                self._moved[shard] = machine(shard)
                self._there.add(shard)

    def successor(self, shard: Node) -> Backing | None:
        """What the shard's backup has kept, if the shard goes on from that."""
        if shard not in self._ends:
            return None
        found = self._hosts.pop(self._ends.pop(shard))
        if self._several:  # a coordinator that has died may not have admitted it
            self._moved[shard] = found.hosts.machine(shard)
            self._there.add(shard)
        return found

    def watch(self, world: World, node: Node, what: object) -> None:
        match what:
            case StartMember(Node("part") as part, PartPlace(shards=moved)):
                self._told |= {(placed.node, placed.machine, part) for placed in moved}
            case StartMember(shard, ends=Node() as ends):
                if ends in world.processes and world.processes[ends].end is None:
                    raise Broken("I24", f"{shard} starts on machine {node.index}, and {ends} goes on")
                self._ends[shard] = ends
            case End() if node in self._hosts:  # its shard may wait for that
                world.post(world.processes[node].home, ProcessEnded(node, "it has ended"))
            case Admit(shard, machine) if node == COORDINATOR and shard.role == "shard" and self._several:
                if self._moved.get(shard) != machine:
                    self._moved[shard] = machine
                    self._there.discard(shard)
            case Admit(shard, machine) if shard.role == "shard":
                self._told.add((shard, machine, node))
                world.post(node, PeerReached(shard))
                world.post(shard, PeerReached(node))
            case Transmit(to, Frame(message=Exchanged() as answer)) if node.role == "shard":
                self._check_answer(world, node, to, answer)

    def _check_answer(self, world: World, shard: Node, to: Node, answer: Exchanged) -> None:
        process = world.processes.get(shard)
        linked = process.linked if process is not None else None
        if not isinstance(linked, Copied) or linked._backup is None:
            return
        host = self._hosts.get(linked._backup)
        if host is not None and host.taken and host.version < answer.version:
            raise Broken(
                "I23", f"{shard} answers {to} with version {answer.version}, and its backup has {host.version}"
            )
