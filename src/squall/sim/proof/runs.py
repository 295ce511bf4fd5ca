"""A run in a chaotic world: its machines, their hosts, and the auditor who watches them, from life to life."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from squall.protocol.backup import Backup
from squall.protocol.best import Goal
from squall.protocol.collective.coordinator import CollectiveCoordinator
from squall.protocol.deputy import Deputy
from squall.protocol.effects import PublishSnapshot, Transmit
from squall.protocol.evaluator import Evaluator
from squall.protocol.frames import Frame
from squall.protocol.leases import Leases, Limits
from squall.protocol.link import Linked
from squall.protocol.loop_coordinator import LoopCoordinator
from squall.protocol.machine import Machine
from squall.protocol.messages import Evaluate
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.notes import EvaluationAsked, MemberDied, WeightsMeasured
from squall.protocol.parcels import Parcelled, PartMachine
from squall.protocol.policy import MachineRoom, Policy
from squall.protocol.replica import Replica
from squall.protocol.sandblaster.coordinator import BatchCoordinator
from squall.protocol.shard import Shard
from squall.protocol.shard_duties import ShardDuties
from squall.runtime.driver import Host
from squall.runtime.world_nodes import Premises
from squall.sim.proof.backed import Backing, Backups, MortalCopied
from squall.sim.proof.batch_invariants import BatchAuditor
from squall.sim.proof.broken import Broken, Watcher
from squall.sim.proof.chaos import Chaos
from squall.sim.proof.chaotic_machines import PULSE
from squall.sim.proof.coordinator_phantom import CoordinatorPhantom
from squall.sim.proof.deputed import Deputies, DeputyPhantom
from squall.sim.proof.invariants import Auditor
from squall.sim.proof.loops import leaves_out, rates, rates_of_one, steps
from squall.sim.proof.memory import File
from squall.sim.proof.mortal import Mortal, MortalJournal, Retelling, copies_every
from squall.sim.proof.phantom_hosts import PhantomHosts
from squall.sim.proof.phantoms import Phantom, ShardPhantom
from squall.sim.proof.positions import restored
from squall.sim.proof.rotten import allowed
from squall.sim.proof.spread import FirstPart, Follower

ADDRESS = "10.0.0.1:7700"  # where each replica says that it is called


class SavedSnapshot(NamedTuple):
    """A published snapshot. All shards of a resumed run count on from the newest version, and the fewest examples."""

    manifest: PublishSnapshot
    files: Sequence[File]  # by shard

    @property
    def version(self) -> int:
        return max(self.manifest.versions)

    @property
    def examples(self) -> int:
        return min(self.manifest.examples)


class ChaoticRun(ABC):
    """A run in a chaotic world. `begin` is called once for each of its lives."""

    hosts: PhantomHosts
    _kind_of_hosts: type[PhantomHosts] = PhantomHosts
    _auditor: Watcher
    _coordinator: LoopCoordinator | BatchCoordinator | CollectiveCoordinator

    def __init__(self, chaos: Chaos) -> None:
        self.chaos = chaos
        self.recipe = chaos.recipe
        self.saved: SavedSnapshot | None = None  # what this life goes on from
        self.computed = 0  # computations in earlier lives
        self.best: tuple[float, float] | None = None  # `PhantomHosts.best`, as earlier lives have left it
        self._least = math.inf  # of all losses that were recorded
        self._moving = False  # the coordinator goes on elsewhere, and has not said so yet

    def begin(
        self, now: Callable[[], float], machine: Callable[[Node], int], rooms: tuple[MachineRoom, ...]
    ) -> None:  # fmt: skip
        """`machine` says where a node is; `rooms` are those of the life that begins."""
        self._rooms = rooms
        self.hosts = self._kind_of_hosts(self.recipe, now, self.computed)
        self.hosts.best, self.hosts.travels = self.best, self.chaos.travels and self.chaos.machines == 1
        self.hosts.machine = machine
        self.journals: dict[Node, MortalJournal] = {}  # which outlive their processes
        self._held: dict[Node, Phantom] = {}  # what these leave to their successors
        self._retelling = Retelling()
        self.backups = Backups(bool(rooms))
        self.deputies = Deputies(machine)
        self._asked = -1  # the evaluation that the record was told of last
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Make the coordinator, and tell the auditor of the new life."""

    @abstractmethod
    def _machine(self, node: Node) -> Machine:
        """Of a shard or a replica."""

    @abstractmethod
    def finished(self, lives: int, spoilt: bool) -> None:
        """The run has ended well. Raise `Broken` where that is not so."""

    def watch(self, now: float, node: Node, what: object) -> None:
        """Raise `Broken` where an invariant does not hold."""
        if node.role not in ("part", "backup", "deputy"):  # what these have is in `spread`, `backed` and `deputed`
            self._auditor.watch(now, node, what)
        match what:
            case EvaluationAsked(number):
                self._asked = number
            case Transmit(frame=Frame(message=Evaluate(number))) if number != self._asked:
                raise Broken("I7", f"evaluation {number} is asked for, and the record names {self._asked}")
            case MemberDied(node) if node == COORDINATOR and self._moving:  # what was measured before was told before
                self._moving, self._least = False, math.inf
        if self.chaos.keeps and not self._moving and isinstance(what, WeightsMeasured) and "loss" in what.values:
            self._least = min(self._least, what.values["loss"])
            told, kept = self.hosts.best or (math.inf, math.inf)
            if told != kept or self._least < kept:
                raise Broken("I9", f"the best loss is {self._least}, and weights of {kept} are kept as those of {told}")

    def cut(self, sender: Node, to: Node) -> bool:
        """They do not reach each other: one has moved, and the other does not call it where it is."""
        return self.backups.cut(sender, to) or self.deputies.cut(sender, to)

    def repeats(self, what: object) -> bool:
        """The coordinator does again what the one before it has done."""
        return self._retelling.repeats(self._held[COORDINATOR], what)

    def member(self, node: Node) -> tuple[Linked, Host]:
        """A new process: its machine and its host."""
        if node.role == "shard" and (before := self.backups.successor(node)) is not None:
            return self._taken_over(node, before)
        if (deputy := self.deputies.successor(node)) is not None:
            return self._led(deputy)
        if node.role == "deputy":
            deputy = self.deputies.begin(self.hosts, node)
            return Linked(Deputy(node, self.hosts.machine(node), address=ADDRESS, pulse=PULSE)), deputy
        if node.role == "backup":
            return Linked(Backup(node, address=ADDRESS)), self.backups.begin(self.hosts, node)
        old = self._held.get(node)  # what it holds outlives its process
        if old is not None and self.journals[node].begun:
            return self._successor(node, old), old
        chaos, shards = self.chaos, self.recipe.shards
        if node.role == "part" and not shards:
            return Linked(Follower(node)), Premises()
        file = self.saved.files[node.index] if self.saved is not None and node.role == "shard" else None
        machine: Machine
        match node.role:
            case "coordinator":
                machine = self._coordinator
            case "evaluator":
                machine = Evaluator(node, shards, keep="loss" if chaos.keeps else "")
            case "part":
                machine = PartMachine(node, chaos.parts, shards, self.recipe.work.buffers)
            case "shard" if self._rooms and chaos.parts > 1:
                apart = [each for room in self._rooms for each in room.nodes if each.role == "part"]
                shard = self._machine(node)
                assert isinstance(shard, ShardDuties)
                machine = Parcelled(shard, chaos.parts, apart)
            case _:
                machine = self._machine(node)
        linked = FirstPart(machine) if shards and self.hosts.others(node) else Linked(machine)
        host = old or self.hosts.host(node, self._version, file)
        if node == COORDINATOR or node.role == "shard":
            journal = self.journals.setdefault(node, MortalJournal())
            journal.keeps, self._held[node] = host.keeps, host
            copied = chaos.copies > 1 and (node.role == "shard" or chaos.deputy)
            kind = MortalCopied if copied else Mortal
            linked = kind(machine, journal)
        return linked, host

    def _led(self, before: DeputyPhantom) -> tuple[Linked, Host]:
        """The coordinator goes on from what its deputy has kept, and the record is that one's."""
        held = self._held[COORDINATOR] = self.hosts.host(COORDINATOR)
        assert isinstance(held, CoordinatorPhantom)
        journal = self.journals[COORDINATOR] = before.journal
        linked = journal.succeed()
        self._coordinator = cast("LoopCoordinator", linked.machine)
        self.deputies.check_lead(before.node, self._coordinator)
        self.backups.led(self.hosts.machine)
        fresh = self._retelling.goes_on(before.first, before.said)
        self.hosts.notes = self._retelling.notes
        for effect in before.said:
            published = isinstance(effect, PublishSnapshot) and effect not in self.hosts.published
            self.hosts.published += [effect] if isinstance(effect, PublishSnapshot) and published else []
            if published or any(effect is note for note in fresh):
                self.watch(self.hosts.now(), COORDINATOR, effect)
        self._moving = True
        if self.hosts.machine(self._coordinator._evaluations.evaluator) == self._coordinator.home:
            self.hosts.best = None  # the file that was kept is on the machine that was lost
        held.take_again(cast("dict[str, Any]", journal.kept), journal.carried_out)
        journal.keeps = held.keeps
        return linked, held

    def _taken_over(self, shard: Node, before: Backing) -> tuple[Linked, Host]:
        """It goes on from what its backup has kept."""
        held = self._held[shard] = self.hosts.goes_on(shard, before)
        self.journals[shard] = before.journal
        assert isinstance(self._auditor, Auditor | BatchAuditor)
        self._auditor.taken_over(shard.index, before.point, before.made)
        return before.journal.succeed(before.version), held

    def _successor(self, node: Node, held: Phantom) -> Linked:
        journal = self.journals[node]
        if isinstance(held, ShardPhantom):
            held.dies()
            copied = held.torn(journal.torn) if journal.torn is not None else None
            if copied is None:
                journal.torn = None
            return journal.succeed(held.version, copied)
        linked = journal.succeed()
        if isinstance(held, CoordinatorPhantom):
            held.take_again(cast("dict[str, Any]", journal.kept), journal.carried_out)
            self._coordinator = cast("LoopCoordinator", linked.machine)
        return linked

    def _part(self, replica: Node) -> int:
        """Whether it is the first of several that exchange by themselves."""
        return 0 if self.hosts.others(replica) else -1

    def over(self) -> None:
        """A life is over: the next goes on from its newest snapshot."""
        self.computed, self.best = self.hosts.computed, self.hosts.best
        if self.hosts.published:
            manifest = self.hosts.published[-1]
            self.saved = SavedSnapshot(manifest, self.hosts.files(manifest.number))

    @property
    def _policy(self) -> Policy:
        chaos = self.chaos
        return Policy(
            chaos.replicas, self.recipe.shards, evaluate=chaos.evaluate, evaluate_every_s=chaos.evaluate_every_s,
            snapshot_every_s=chaos.snapshot_every_s, snapshot_first_s=math.inf if self.saved is None else 0.005,
            goal=Goal(keep=chaos.keeps, best=self.best[0] if self.best is not None else None),
            rooms=self._rooms, goes_back=bool(self._rooms), parts=chaos.parts, spread_parts=chaos.spread_parts,
            copies=chaos.copies, deputy=chaos.deputy,
            loaders=chaos.loaders, succeeds=True, pulse=PULSE, quarantine=allowed(chaos.seed, self.recipe),
        )  # fmt: skip

    @property
    def _version(self) -> int:
        return self.saved.version if self.saved is not None else 0

    @property
    def _examples(self) -> int:
        return self.saved.examples if self.saved is not None else 0


class ChaoticLoopRun(ChaoticRun):
    """A run that trains batch by batch."""

    _auditor: Auditor

    def __init__(self, chaos: Chaos) -> None:
        super().__init__(chaos)
        self._limits = Limits(epochs=chaos.epochs)
        copied = chaos.copies > 1
        self._auditor = Auditor(self.recipe, chaos.examples, chaos.batch_size, self._limits, copied)

    def _begin(self) -> None:
        chaos, hosts, saved = self.chaos, self.hosts, self.saved
        hosts.copies_every = copies_every(chaos.seed, chaos.faults)
        if chaos.scripted:
            hosts.logs, hosts.leaves_out = True, leaves_out
        if chaos.scripted and self.recipe.work.several_steps:
            hosts.steps_on, hosts.factors = steps, rates_of_one
        elif chaos.scripted and self.recipe.work.local is None:  # its own optimizer would take the rates itself
            hosts.factors = rates
        if saved is None:
            leases, number = Leases(chaos.examples, chaos.batch_size, self._limits), 0
            self._auditor.begin(self.hosts)
        else:
            leases, number = restored(saved.manifest, chaos.batch_size, self._limits), saved.manifest.number
            self._auditor.begin(self.hosts, saved.version, saved.files, leases)
        self._coordinator = LoopCoordinator(self._policy, self.recipe.loop.exchanges, leases, number)

    def _machine(self, node: Node) -> Machine:
        exchanges = self.recipe.loop.exchanges
        if node.role == "shard":
            return Shard(node.index, exchanges, self._version, self._examples, copied=True)
        size = self.chaos.batch_size
        return Replica(node, self.recipe.shards, size, exchanges, address=ADDRESS, part=self._part(node))

    def finished(self, lives: int, spoilt: bool) -> None:
        self._auditor.finished(lives, self._coordinator.trained)
