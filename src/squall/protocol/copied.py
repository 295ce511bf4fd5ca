"""A shard, or coordinator, whose machine may be lost: a backup on another one has all that it has, before others hear.

Each event that it takes goes to its backup as an entry, and what it leads others to hear waits until the backup has
that entry; so does what goes into the record. The backup is the same machine: it takes the same events, moves numbers
of its own in the same way, and says nothing (`protocol.backup`). So taking over is the succession of a process that has
died (`protocol.succession`), from the journal of another machine. This is replication of a deterministic machine by its
log, with one backup (Bressoud, Schneider, "Hypervisor-based fault tolerance", 1996).

What a backup begins with travels in parts, while others go on: first what the machine is, and then the numbers, piece
by piece (`CopyMore`). A part has its place among the entries, so what it brings is as the shard had it there, whatever
the backup has made of that before. The next one follows when the backup has it. From the first on all waits for the
backup, which can take over when it has the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from msgspec.structs import replace

from squall.protocol.copy_messages import Entry, Has, Whole
from squall.protocol.effects import Admit, Effect, End, Forget, Payload, PublishSnapshot, Send, Transmit
from squall.protocol.events import CopyKnown, Event, FrameArrived, MessageArrived, PeerReached, TimePassed, pack
from squall.protocol.frames import LOST, Frame, Message
from squall.protocol.loss_messages import SnapshotLost
from squall.protocol.machine import Machine, Refusal
from squall.protocol.messages import SnapshotPiece
from squall.protocol.moved import Movable
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.notes import Note
from squall.protocol.nursery_messages import Refused
from squall.protocol.succession import Journal, less

RECORDED = (Note, PublishSnapshot)


class Attach(Effect, frozen=True, gc=False):
    """Bring a message's numbers to their place: it leaves later, as one whose numbers are there."""

    payload: Payload


class CopyTo(Effect, frozen=True, gc=False):
    """Make what this is now ready to travel: `CopyKnown` answers. None: there is no backup any more."""

    backup: Node | None
    machine: int = 0
    beside: tuple[Node, ...] = ()
    state: bytes = b""
    waiting: tuple[Payload, ...] = ()  # pushes that are not applied yet, and do not lie on the backup's machine
    number: int = 0  # of the first part


class CopyMore(Effect, frozen=True, gc=False):
    """Make the next numbers of this ready to travel, as they are now: `CopyKnown` answers."""

    backup: Node
    number: int


@runtime_checkable
class Pushed(Protocol):
    """A machine to which others push."""

    def waiting(self) -> Sequence[Payload]:
        """What was pushed, and is not applied yet."""

    def brings(self, sender: Node, message: Message) -> Payload | None:
        """The numbers of a push, where the message is one."""


class Copied(Movable):
    """A machine behind its links, with at most one backup."""

    def __init__(self, machine: Machine, journal: Journal) -> None:
        super().__init__(machine, journal)
        self._pushed = machine if isinstance(machine, Pushed) else None
        self._alone()

    def _alone(self) -> None:
        self._backup: Node | None = None
        self._failed: Node | None = None  # that was one, and could not be given all
        self._where = 0  # its machine
        self._beside: set[Node] = set()  # replicas there
        self._number = self._has = 0  # of the newest entry; and of the newest that the backup has
        self._part = 0  # the number of the part of a copy behind which another one comes
        self._queued: deque[Send] | None = None  # entries that wait until a part can leave
        self._held: deque[tuple[int, Effect]] = deque()  # until the backup has that entry
        self._refused = False  # the backup, which may go on all the same until the coordinator has parted with it
        self._accuses: Refused | None = None  # what the coordinator is told of that

    @property
    def held(self) -> bool:
        return bool(self._held) or super().held

    @property
    def held_for(self) -> Node | None:
        return self._backup if self._held else None

    def awaits(self) -> Node | None:
        return self.held_for or super().awaits()

    @property
    def backup(self) -> Node | None:
        return self._backup

    def _take(self, event: Event, now: float) -> list[Effect]:
        entered = self._backup is not None and not self._refused and not self._of_backup(event, now)
        brought = self._brought(event)
        effects = super()._take(event, now)
        released, effects = effects[: self._first], effects[self._first :]  # what was left has waited, and comes first
        if self._backup in self._forgotten and not self._refused:
            released += self._refuse_backup()
        goes_on = entered and self._backup is not None and not self._refused
        first: list[Effect] = []
        if goes_on:  # what it says to the backup itself has a lower number than the entry, which is made last
            first = [each for each in effects if isinstance(each, Transmit) and each.to == self._backup]
            effects = [each for each in effects if each not in first] if first else effects
            first += self._enter(event, now, brought)
        if self._accuses is not None and type(event) in (TimePassed, FrameArrived):  # it may be lost
            effects.append(Transmit(COORDINATOR, Frame(0, 0, self._accuses)))
        return released + first + self._keep_back(effects)

    @property
    def _whole(self) -> bool:
        """The backup is."""
        return self._backup is not None and self._queued is None and not self._part

    def _refuse_backup(self) -> list[Effect]:
        """What leaves: all where it was not whole; else nothing, until the coordinator has parted with it."""
        if self._whole:
            self._refused = True
            return []
        leave = [effect for _, effect in self._held]
        self._alone()
        return leave

    def _tell_coordinator(self, message: Message, now: float, effects: list[Effect]) -> None:
        """A backup that goes on although it is refused has not taken that: its own next message has this number."""
        elsewhere = self.machine.node != COORDINATOR
        if isinstance(message, Refused) and message.node == self._backup and self._whole and elsewhere:
            self._accuses = message
            effects.append(Transmit(COORDINATOR, Frame(0, 0, message)))
        else:
            super()._tell_coordinator(message, now, effects)

    def _waits(self, sent: Transmit) -> bool:
        """It has not left yet."""
        frames = (each for _, each in self._held if isinstance(each, Transmit) and each.to == sent.to)
        return any(each.frame.number == sent.frame.number for each in frames)

    def _of_backup(self, event: Event, now: float) -> bool:
        """It has to do with the backup alone, which need not know of it."""
        match event:
            case FrameArrived(sender, frame):  # what it tells a coordinator beside that is an entry as well
                copy = frame.number == LOST or (frame.number > 0 and not self.takes(sender, frame.number))
                return copy or (sender == self._backup and (frame.message is None or type(frame.message) is Has))
            case PeerReached(node):
                return node == self._backup
            case TimePassed():
                at = self.machine.wake_at
                others = [link for node, link in self._links.items() if node != self._backup]
                dues = [at, *(link.resend_due for link in others), *(link.ack_due for link in others)]
                return not any(due is not None and due <= now for due in dues)
        return type(event) is CopyKnown

    # ------------------------------------------------------------ entries

    def _enter(self, event: Event, now: float, brought: Payload | None) -> list[Effect]:
        self._number += 1
        assert self._backup is not None
        send = Send(self._backup, Entry(self._number, *pack(event), now), brought)
        if self._queued is not None:
            self._queued.append(send)
            return []
        return [self._send(send, now)]

    def _on_has(self, number: int, now: float, effects: list[Effect]) -> None:
        if number > self._number:
            raise Refusal(f"it has entry {number}, and the last one is {self._number}")
        self._has = max(self._has, number)
        if not self._part or self._queued is not None or self._has < self._part:
            return
        assert self._backup is not None
        link = self._links[self._backup]  # nobody may be sent a part again that is not kept
        parts = [number for number, send in link.unacked if isinstance(send.message, Whole)]
        self._acknowledged(link, max(parts, default=0), now)
        self._number += 1
        self._part, self._queued = self._number, deque()
        effects.append(CopyMore(self._backup, self._part))

    def _on_known(self, event: CopyKnown, now: float) -> list[Effect]:
        if not event.size:  # a backup without all of this is none: it ends, and the coordinator begins another
            effects: list[Effect] = [self._send(Send(event.backup, Whole(self._part, 0)), now)]
            effects += [effect for _, effect in self._held]
            self._alone()
            self._failed = event.backup
            return effects
        payload = Payload("copy", event.backup, event.size, self._part, self.machine.node.index)
        part = Send(event.backup, Whole(self._part, event.size, event.last), payload)
        assert self._queued is not None
        queued, self._queued, self._part = self._queued, None, 0 if event.last else self._part
        return [self._send(each, now) for each in (part, *queued)]

    def _brought(self, event: Event) -> Payload | None:
        """The numbers of a push, which do not lie on the backup's machine. Of a copy they belong nowhere any more."""
        if self._backup is None or type(event) is not FrameArrived or (message := event.frame.message) is None:
            return None
        if self._pushed is None or not self.takes(event.sender, event.frame.number):
            return None
        payload = self._pushed.brings(event.sender, message)
        return None if payload is None or self._lies_beside(payload) else payload

    def _lies_beside(self, payload: Payload) -> bool:
        """On the backup's machine; another part than the first has buffers of its own."""
        return payload.owner in self._beside and payload.part <= 0

    def _hand_over(self, event: Event, now: float, effects: list[Effect]) -> None:
        if type(event) is MessageArrived and type(event.message) is Has:
            if event.sender == self._backup:
                self._on_has(event.message.number, now, effects)
        elif type(event) is CopyKnown:
            if self._queued is not None and self._backup == event.backup:
                effects += self._on_known(event, now)
        else:
            super()._hand_over(event, now, effects)

    def _keep_back(self, effects: list[Effect]) -> list[Effect]:
        """What others hear waits for the backup; all else is carried out."""
        kept: list[Effect] = []
        asked: list[CopyTo | CopyMore] = []
        for effect in effects:
            match effect:
                case Transmit(frame=Frame(0, message=message)) if message is not None:
                    kept.append(effect)  # it says that this is there, which is so whatever the backup has
                case Transmit(to=to, frame=frame, again=True) if self._backup is not None and to != self._backup:
                    if not self._waits(effect):  # a connection may have lost it; what waits comes behind it
                        kept.append(replace(effect, frame=replace(frame, seen=0)))  # the backup may not have it
                case Transmit(to=to, payload=payload) if self._backup is not None and to != self._backup:
                    if payload is not None:
                        kept.append(Attach(payload))
                        effect = replace(effect, again=True)
                    self._held.append((self._number, effect))
                case _ if self._backup is not None and isinstance(effect, RECORDED):
                    self._held.append((self._number, effect))
                case Forget(node) if any(isinstance(each, Transmit) and each.to == node for _, each in self._held):
                    self._held.append((self._number, effect))  # it waits for these, its last
                case End():
                    kept += [each for _, each in self._held if isinstance(each, RECORDED)]
                    self._held = deque(each for each in self._held if not isinstance(each[1], RECORDED))
                    kept.append(effect)
                case CopyTo() | CopyMore():
                    asked.append(effect)  # behind all else that the event leads to, of which the state has come
                case Admit(node, machine) if self._backup is not None and machine == self._where:
                    self._beside.add(node)
                    kept.append(effect)
                case _:
                    kept.append(effect)
        while self._held and self._held[0][0] <= self._has and not self._refused:
            kept.append(self._held.popleft()[1])
        for each in asked:
            kept += self._copy_to(each) if isinstance(each, CopyTo) else [each]
        return kept

    def _lose_files(self) -> None:
        super()._lose_files()
        for place, (number, effect) in enumerate(self._held):
            if isinstance(effect, Transmit) and isinstance(piece := effect.frame.message, SnapshotPiece):
                frame = replace(effect.frame, message=SnapshotLost(piece.number))
                self._held[place] = number, Transmit(effect.to, frame)

    def _reduce(self, version: int, lost: int) -> None:
        super()._reduce(version, lost)
        self._held = deque(
            (number, less(effect, version, lost) if isinstance(effect, Transmit) else effect)
            for number, effect in self._held
        )

    # ------------------------------------------------------------ another backup, or none

    def _copy_to(self, asked: CopyTo) -> list[Effect]:
        """What was held for the one before leaves: the coordinator knows that it cannot take over."""
        effects = [effect for _, effect in self._held]
        for before in (self._backup, self._failed):
            if before is not None:
                effects.append(Forget(before))
                self._forget(before, [])
        self._alone()
        if asked.backup is None:
            return [*effects, asked]
        state = self._bare()
        self._backup, self._where, self._beside = asked.backup, asked.machine, set(asked.beside)
        self._number = self._part = 1
        self._queued = deque()
        pushes = self._pushed.waiting() if self._pushed is not None else ()
        waiting = tuple(each for each in pushes if not self._lies_beside(each))
        return [*effects, replace(asked, state=state, waiting=waiting, number=self._part)]
