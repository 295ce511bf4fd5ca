"""What the coordinator of a chaotic world must know of machines, and where it must have replicas started."""

from __future__ import annotations

from squall.protocol.copied import CopyTo
from squall.protocol.copy_messages import Entry, Has
from squall.protocol.effects import Effect, End, StartMember, Transmit
from squall.protocol.epoch_messages import Abandon
from squall.protocol.events import Event, FrameArrived, PeerRefused, Started, StopRequested
from squall.protocol.frames import Frame
from squall.protocol.messages import Stop
from squall.protocol.nodes import COORDINATOR, NURSERY, Node
from squall.protocol.notes import MachineDied, Remark, TrainingOver
from squall.protocol.nursery_messages import (
    Joined,
    KillProcess,
    Leads,
    Leaving,
    ProcessLost,
    Replaced,
    StartProcess,
    StopAsked,
)
from squall.runtime.placement import Parts
from squall.sim.proof.broken import Broken


class MachineBooks:
    """What the coordinator must know of machines, from what it hears and says."""

    def __init__(self, replicas: int, parts: Parts, rooms: dict[int, int], of: dict[Node, int] | None) -> None:
        """`of`: where nodes begin; None: all on machine 0."""
        self.died: dict[int, None] = {}
        self.told_ended: int | None = None  # a machine that has just taken the news that it was replaced
        self._rooms, self._numbers = dict(rooms), set(rooms)  # the second: of all that have ever come
        slots = range(replicas)
        at = of if of is not None else {Node("replica", slot): 0 for slot in slots}
        self._parts, self._together = parts.number, parts.spread is None
        apart = {self._slot(node) for node in at if node.role == "part"}
        self._at = {  # slot -> machines of the replica's processes, as far as it has had them started
            node.index: [machine] * (1 if node.index in apart else self._parts)
            for node, machine in at.items()
            if node.role == "replica"
        }
        self._owed = {slot: None for slot in slots if slot not in self._at}  # replicas that are to start somewhere
        self._ending: dict[Node, int] = {}  # processes that it wants killed, and their machines
        self._ended: dict[Node, tuple[int, int]] = {}  # those of which word has come: from where, in which message
        self._told: dict[int, int] = {}  # machine -> number of the message that tells it that it was replaced
        self._joined: dict[int, tuple[int, int]] = {}  # machines of which word has come: room, and in which message
        self._asks: dict[int, None] = {}  # machines that want to leave, of which it has said nothing: the run may move
        self._leaving: dict[int, None] = {}
        self._parting = False  # with its deputy, on whose machine, and on others, nothing starts meanwhile
        self._said: dict[Node, set[int]] = {}  # numbers of messages to whom
        self._begun = self.over = False  # the second: nobody is started any more
        self._behind = False  # a coordinator has still to do what the one before it has not
        self._starts = False  # just now
        self._waits_for: int | None = None  # the entry that its deputy must have, before it has done that

    def watch(self, node: Node, what: Event | Effect) -> None:
        if isinstance(what, StartMember) and what.node == COORDINATOR:
            self._behind, self._waits_for = True, None
            self._parting &= what.ends is None
        elif isinstance(what, Transmit):
            self._on_sent(node, what)
        elif node == COORDINATOR:
            if isinstance(what, Event):
                if not self._behind and self._waits_for is None:
                    self._check_owed()
                self._starts = type(what) is Started
                self._begun, self._behind = self._begun or self._starts, False
            self._on_coordinator(what)

    def _check_owed(self) -> None:
        ending = set(map(self._slot, self._ending))
        owed = [slot for slot in self._owed if slot not in ending]
        if not self._begun or self.over or not owed or self._asks or self._parting:
            return
        taken = [machine for on in self._at.values() for machine in on]
        free = {machine: room - taken.count(machine) for machine, room in self._rooms.items()}
        untold = sum(self._parts - len(on) for on in self._at.values())  # places of parts that start later
        rooms = [room for room in free.values() if room > 0]
        if (max(rooms, default=0) if self._together else sum(rooms)) - untold >= self._parts:
            raise Broken("I10", f"replica {min(owed)} is nowhere, and there is room: {free}")

    def _slot(self, node: Node) -> int:
        return node.index // self._parts if node.role == "part" else node.index

    def _on_coordinator(self, what: Event | Effect) -> None:
        match what:
            case FrameArrived(_, frame) if isinstance(joined := frame.message, Joined):
                self._joined.setdefault(joined.machine, (joined.room, frame.number))
            case MachineDied(machine, nodes):
                self.died[machine] = None
                self._joined[machine] = 0, 0
                self._rooms.pop(machine, None)
                self._asks.pop(machine, None)
                self._at = {slot: on for slot, on in self._at.items() if machine not in on}
                self._owed |= {self._slot(node): None for node in nodes if node.role in ("replica", "part")}
                self._ending = {process: at for process, at in self._ending.items() if at != machine}
            case FrameArrived(Node("nursery", machine), frame) if isinstance(frame.message, ProcessLost):
                self._ended[frame.message.node] = machine, frame.number
            case FrameArrived(Node("deputy"), Frame(message=Has(number))) if number >= (self._waits_for or 0):
                self._waits_for = None
            case CopyTo():
                self._waits_for, self._parting = None, False
            case FrameArrived(Node("nursery", machine), frame) if isinstance(frame.message, Leaving):
                if self._rooms.pop(machine, None) is not None:
                    self._asks[machine] = None
            case PeerRefused(Node("nursery", machine)):  # nothing is said to it any more, though it is lost later
                self._rooms.pop(machine, None)
            case FrameArrived(_, frame) if isinstance(frame.message, StopAsked):
                self.over = True
            case StopRequested() | TrainingOver() | End() | Remark(kind="nonfinite"):
                self.over = True

    def _on_sent(self, node: Node, sent: Transmit) -> None:
        message = sent.frame.message
        if node.role == "nursery" and self._told.get(node.index, sent.frame.seen + 1) <= sent.frame.seen:
            self.told_ended = node.index
            del self._told[node.index]
        if node != COORDINATOR:
            return
        for joined, (room, number) in self._joined.items():
            if room and sent.to == NURSERY and number <= sent.frame.seen:
                self._rooms[joined], self._joined[joined] = room, (0, number)
                self._numbers.add(joined)
        for process, (machine, number) in list(self._ended.items()):
            if sent.to == Node("nursery", machine) and number <= sent.frame.seen:
                self._ending.pop(process, None)
                del self._ended[process]
        said = self._said.setdefault(sent.to, set())
        if sent.again and sent.frame.number in said:  # else the one before it has kept it back
            return
        said.add(sent.frame.number)
        match message:
            case Entry(number) if self._starts:
                self._waits_for = number
            case StartProcess(Node("replica", slot), first):
                self._at[slot] = [sent.to.index] * (self._parts if first is None else 1)
                self._owed.pop(slot, None)
            case StartProcess(Node("part") as part):
                self._at.get(self._slot(part), []).append(sent.to.index)  # none: its replica has died meanwhile
            case KillProcess(process):
                self._ending[process] = sent.to.index
            case Leaving():  # without a shard there: else the run moves
                self._leaving[sent.to.index] = None
                self._asks.pop(sent.to.index, None)
            case Abandon():
                self._parting = True
            case Leads(number) if number in self._numbers:
                raise Broken("I12", f"the next machine is to be {number}, as one before")
            case Replaced():
                self._told.setdefault(sent.to.index, sent.frame.number)
            case Stop() if sent.to.role != "nursery":
                self.over |= self._leaving.keys().isdisjoint(self._at.get(sent.to.index, []))
