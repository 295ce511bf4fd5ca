"""Worlds in which the coordinator has a deputy: what that works on, who reaches whom, and what must hold (I25, I26).

Where the deputy takes over, the machine of the coordinator before it counts for nothing more: nobody hears it, and it
ends. So it is taken out of the world, if it is still there, and what it must not do meanwhile is looked at before.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

from squall.protocol.backup import TakeCopy
from squall.protocol.closing import Phase
from squall.protocol.copied import Copied, CopyTo
from squall.protocol.copy_messages import CopyKept
from squall.protocol.deputies import Deputed
from squall.protocol.effects import Admit, Effect, End, Forget, Payload, PublishSnapshot, StartMember, Transmit
from squall.protocol.epoch_messages import Voted
from squall.protocol.events import CopyTaken, Event, FrameArrived, PeerReached, ProcessEnded
from squall.protocol.frames import Frame
from squall.protocol.loop_coordinator import LoopCoordinator
from squall.protocol.nodes import COORDINATOR, NURSERY, Node
from squall.protocol.notes import Note
from squall.protocol.nursery import Redirect
from squall.protocol.nursery_messages import Placed
from squall.runtime.driver import LINGER_S
from squall.runtime.world import World
from squall.sim.proof.broken import Broken
from squall.sim.proof.machines import lose_under_way
from squall.sim.proof.mortal import MortalJournal
from squall.sim.proof.phantom_hosts import PhantomHosts
from squall.sim.proof.phantoms import Phantom

LOOK_EVERY_S = 0.01


class DeputyPhantom(Phantom):
    """Keeps a record of its own."""

    def __init__(self, hosts: PhantomHosts, node: Node) -> None:
        super().__init__(hosts, node)
        self.journal = MortalJournal()
        self.journal.keeps = lambda: {"told": (self.told, [])}
        self.first = self.told = 0  # notes before it came, and all so far
        self.said: list[Effect] = []  # for the record, since it came

    def attach(self, payload: Payload) -> None:
        """What comes for the coordinator lies where that is."""

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, TakeCopy):
            state, self.told = self.memory.wholes.pop((self.node, effect.payload.clock))
            self.first = self.told
            copied: Copied = pickle.loads(state)
            copied.journal_into(self.journal)
            return CopyTaken(copied)
        if isinstance(effect, Note | PublishSnapshot):
            self.told += isinstance(effect, Note)
            self.said.append(effect)
        return None


class Deputies:
    """Of one life: where the coordinator is, who reaches it there, and how nurseries vote."""

    def __init__(self, machine: Callable[[Node], int]) -> None:
        self._machine = machine  # of a node
        self._hosts: dict[Node, DeputyPhantom] = {}
        self._known: set[Node] = set()  # nurseries that know where the deputy of now is, or was that leads
        self._redirected: set[int] = set()  # machines whose processes know where the coordinator is
        self._told: set[tuple[Node, Placed]] = set()  # processes that know where it is
        self._ends: Node | None = None  # the deputy in whose place the coordinator that starts goes on
        self._votes: dict[Node, dict[int, bool]] = {}  # deputy -> machine -> whether that follows it
        self._voters: dict[Node, int] = {}  # deputies that may take over -> machines that there were
        self._parted: set[Node] = set()  # deputies that their coordinator goes on without
        self._over: set[Node] = set()  # those whose processes have ended
        self.copied: set[int] = set()  # shards that have a backup, as the coordinator has heard
        self.home = NURSERY.index

    def begin(self, hosts: PhantomHosts, node: Node) -> DeputyPhantom:
        found = self._hosts[node] = DeputyPhantom(hosts, node)
        return found

    def cut(self, sender: Node, to: Node) -> bool:
        """One of them is a coordinator that has moved, and the other does not call it there."""
        if COORDINATOR not in (sender, to) or self.home == NURSERY.index:
            return False
        other = to if sender == COORDINATOR else sender
        if other.role == "nursery":
            return other.index not in (self.home, *self._redirected) and other not in self._known
        return other.role != "deputy" and self._machine(other) not in self._redirected

    def late(self, world: World, node: Node, there: Callable[[int], list[Node]]) -> bool:
        """It would lead, and the run has ended, of which the others have not heard.

        Theirs is another, without most machines: it stops as it leads, and its machine with it.
        """
        if node != COORDINATOR or self._ends is None or not world.ended:
            return False
        machine = self._hosts[self._ends].hosts.machine(self._ends)
        for gone in (Node("nursery", machine), *there(machine)):
            world.kill(gone, notice_s=math.inf)
        return True

    def clear(self, world: World, node: Node, there: Callable[[int], list[Node]]) -> None:
        """It starts: if it is the coordinator, in its deputy's place."""
        if node != COORDINATOR or self._ends is None:
            return
        old = world.processes.get(COORDINATOR)
        if old is not None and isinstance(old.linked, Copied) and old.linked.backup != self._ends:
            raise Broken("I25", f"{self._ends} leads, and its coordinator goes on without it")
        for gone in (Node("nursery", self.home), *there(self.home), COORDINATOR):
            world.kill(gone, notice_s=math.inf)
        lose_under_way(world, lambda sender, to: COORDINATOR in (sender, to))
        self.home = self._hosts[self._ends].hosts.machine(self._ends)
        self._redirected.clear()

    def successor(self, node: Node) -> DeputyPhantom | None:
        """What the deputy has kept, if the coordinator goes on from that."""
        if node != COORDINATOR or self._ends is None:
            return None
        found, self._ends = self._hosts.pop(self._ends), None
        return found

    def check_lead(self, deputy: Node, coordinator: LoopCoordinator) -> None:
        """Most machines follow it; or it is only there to save."""
        follow = sum(self._votes.get(deputy, {}).values())
        if 2 * follow <= self._voters[deputy] and coordinator.phase is Phase.RUNNING:
            raise Broken("I25", f"{deputy} leads, and {follow} of {self._voters[deputy]} machines follow it")

    def watch(self, world: World, node: Node, what: object) -> None:
        match what:
            case StartMember(started, ends=Node("deputy") as ends) if started == COORDINATOR:
                if ends in world.processes and ends not in self._over:
                    raise Broken("I24", f"{started} starts on machine {node.index}, and {ends} goes on")
                self._ends = ends
            case End() if node in self._hosts and not self.saves_beside(node):
                self._tell_of_end(world, node, world.now + LINGER_S)
            case Admit(Node("deputy") as deputy) if node.role == "nursery":
                self._known.add(node)
                world.post(node, PeerReached(deputy))
                world.post(deputy, PeerReached(node))
            case Forget(Node("deputy")) if node.role == "nursery":
                self._known.discard(node)
            case Redirect(placed):
                self._redirect(world, node, placed)
            case Transmit(_, Frame(message=Voted(deputy, follows))):
                if self._votes.setdefault(deputy, {}).setdefault(node.index, follows) != follows:
                    raise Broken("I25", f"{node} votes twice, and not the same, on {deputy}")
            case FrameArrived(Node("backup", index), Frame(message=CopyKept())) if node == COORDINATOR:
                self.copied.add(index)
            case FrameArrived(deputy, Frame(message=CopyKept())) if node == COORDINATOR and deputy.role == "deputy":
                if (process := world.processes.get(node)) is not None:  # it may have ended with this
                    rooms = process.linked.machine._placing.rooms  # type: ignore[union-attr]
                    self._voters.setdefault(deputy, len(rooms))
            case Deputed(True) if node == COORDINATOR and [*self._voters.values()][-1] <= 2:  # which would be a tie
                raise Broken("I25", "of two machines one is said to go on without the other")
            case CopyTo(other) if node == COORDINATOR:
                self._check_parting(world)
                self._parted |= self._hosts.keys() - {other}

    def saves_beside(self, deputy: Node) -> bool:
        """The run goes on without it, and what it saves on its machine, which it takes with it, is another one."""
        return deputy in self._parted and 2 * sum(self._votes.get(deputy, {}).values()) <= self._voters.get(deputy, 0)

    def _tell_of_end(self, world: World, deputy: Node, until: float) -> None:
        """The process lingers until its last words have come."""
        process = world.processes.get(deputy)
        if process is None:
            return
        if process.over or world.now >= until:
            self._over.add(deputy)
            world.post(process.home, ProcessEnded(deputy, "it has ended"))
        else:
            world.at(world.now + LOOK_EVERY_S, lambda: self._tell_of_end(world, deputy, until))

    def _redirect(self, world: World, nursery: Node, placed: Placed) -> None:
        """A process hears it of its nursery, and calls the coordinator there."""
        self._redirected.add(nursery.index)
        for node, process in list(world.processes.items()):
            if process.home == nursery != node != COORDINATOR and (node, placed) not in self._told:
                self._told.add((node, placed))
                world.post(node, FrameArrived(nursery, Frame(0, 0, placed)))
                world.post(node, PeerReached(COORDINATOR))
                world.post(COORDINATOR, PeerReached(node))

    def _check_parting(self, world: World) -> None:
        """A coordinator lets go of a deputy that may take over: half of the machines never follow that."""
        for deputy in [deputy for deputy in self._voters if self._goes_on(world, deputy)]:
            stay = 1 + sum(not follows for follows in self._votes.get(deputy, {}).values())
            if 2 * stay < self._voters[deputy] and deputy not in self._parted:
                raise Broken("I25", f"{COORDINATOR} goes on without {deputy}, and {stay} machines with it")

    @staticmethod
    def _goes_on(world: World, deputy: Node) -> bool:
        process = world.processes.get(deputy)
        return process is not None and process.end is None
