"""The delivery contract of every link, written once: in order, at most once, resent until acknowledged.

`Linked` wraps any machine. Each direction of a link numbers its messages 1, 2, 3 ...; the receiver hands them to
the machine in that order and once, holds those that came early, and drops those it has seen. Every frame carries
the highest number received in order (`seen`), so that a reply acknowledges its request without a frame of its own;
where no frame goes back within `ACK_AFTER_S`, one is sent for the acknowledgement alone. What is not acknowledged
is sent again, at doubling intervals, and at once when a broken connection is there again. A few messages have no
number (`frames.UNORDERED`): they come at once, or never, and acknowledge nothing. Only the newest is sent again, with
all else.

A replacement process is a new node, hence a new link: numbers never restart within a link. A machine that has ended
is not bothered any more, but its links are served until its peers know all that it had to say.

A peer that says what none would say is heard no more, and the coordinator is told: its machine is lost to the run.
"""

from __future__ import annotations

from collections import deque

from squall.protocol.effects import Admit, Effect, End, Forget, Send, StartMember, Transmit
from squall.protocol.events import (
    Event,
    FrameArrived,
    MessageArrived,
    PeerReached,
    PeerRefused,
    PeersHeard,
    TimePassed,
)
from squall.protocol.frames import HAVE, LOST, UNORDERED, Frame, Message
from squall.protocol.machine import Awaiting, Machine, Refusal
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.nursery_messages import Heard, Placed, Refused

ACK_AFTER_S = 0.1  # a reply usually comes sooner and carries the acknowledgement
RESEND_AFTER_S = 1.0
RESEND_AT_MOST_S = 8.0
EARLY_AT_MOST = 1024  # messages held for a gap; more are dropped and come again by resending


class Link:
    """One peer: what we sent that it has not acknowledged, and what it sent that came too early."""

    __slots__ = ("ack_due", "early", "newest", "pause", "resend_due", "seen", "sent", "unacked")

    def __init__(self) -> None:
        self.sent = 0  # number of the last message sent
        self.seen = 0  # number of the last message received in order
        self.unacked: deque[tuple[int, Send]] = deque()
        self.early: dict[int, Frame] = {}
        self.newest: Message | None = None  # of what we sent without a number
        self.ack_due: float | None = None
        self.resend_due: float | None = None
        self.pause = RESEND_AFTER_S


class Linked:
    """A machine behind its links: takes `FrameArrived`, gives `Transmit`, and passes all else through."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._awaiting = machine if isinstance(machine, Awaiting) else None
        self._links: dict[Node, Link] = {}
        self._forgotten: dict[Node, None] = {}  # late frames of these are dropped, not answered
        self._admitted: dict[Node, int] = {}  # to what carries frames between machines, and where they are
        self._ended = False  # the machine gave its End
        self._check_at: float | None = None  # no link has anything due before this

    @property
    def wake_at(self) -> float | None:
        own = None if self._ended else self.machine.wake_at
        if own is None or self._check_at is None:
            return self._check_at if own is None else own
        return min(own, self._check_at)

    @property
    def held(self) -> bool:
        return self._awaiting is not None and self._awaiting.held

    @property
    def held_for(self) -> Node | None:
        """Whom it certainly waits for, whoever speaks first."""
        return None

    def awaits(self) -> Node | None:
        return self._awaiting.awaits() if self._awaiting is not None else None

    @property
    def unacknowledged(self) -> int:
        """Messages sent that no peer has confirmed yet."""
        return sum(len(link.unacked) for link in self._links.values())

    def takes(self, node: Node, number: int) -> bool:
        """A frame of this number would be new. A copy is dropped, and so is what comes of a node that is forgotten."""
        if node in self._forgotten:
            return False
        link = self._link(node)
        return number > link.seen and number not in link.early

    def did(self, steps: int = 1) -> None:
        """So many more steps of what the last event has led to are carried out (`protocol.succession`)."""

    def on(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if type(event) is FrameArrived:
            self._receive(event.sender, event.frame, now, effects)
            if self._ended and (known := self._links.get(event.sender)) is not None:
                _acknowledge(event.sender, known, effects)  # the process may be gone before it is due
        elif type(event) is TimePassed:
            if self._check_at is not None and now >= self._check_at:
                self._check(now, effects)
            if self.machine.wake_at is not None and now >= self.machine.wake_at:
                self._hand_over(event, now, effects)
        elif type(event) is PeerReached:
            if (link := self._links.get(event.node)) is not None:
                self._say_all_again(event.node, link, now, effects)
        elif type(event) is PeerRefused:
            self._refuse(event.node, event.why, now, effects)
        elif type(event) is PeersHeard:
            self._tell_coordinator(Heard(event.nodes), now, effects)
        else:
            self._hand_over(event, now, effects)
        return effects

    def _receive(self, sender: Node, frame: Frame, now: float, effects: list[Effect]) -> None:
        if sender in self._forgotten:
            return
        link = self._link(sender)
        self._acknowledged(link, frame.seen, now)
        if frame.number == LOST:
            self._say_all_again(sender, link, now, effects)
            effects.append(Transmit(sender, Frame(HAVE, link.seen)))
        if frame.message is None:
            return
        if not frame.number:
            if isinstance(frame.message, (*UNORDERED, Placed, Refused)):
                self._take_in(sender, frame.message, now, effects)
            else:
                self._refuse(sender, f"it says {type(frame.message).__name__} without a number", now, effects)
            return
        self._owe_ack(link, now)
        if frame.number > link.seen + 1:
            if len(link.early) < EARLY_AT_MOST:
                link.early[frame.number] = frame
            return
        if frame.number <= link.seen:
            return  # a duplicate: the acknowledgement that it lacks is owed already
        current: Frame | None = frame
        while current is not None:
            link.seen += 1
            assert current.message is not None
            self._take_in(sender, current.message, now, effects)
            if sender in self._forgotten:
                return
            current = link.early.pop(link.seen + 1, None)

    def _acknowledged(self, link: Link, seen: int, now: float) -> None:
        unacked = link.unacked
        while unacked and unacked[0][0] <= seen:
            unacked.popleft()
            link.pause = RESEND_AFTER_S
            link.resend_due = None
            if unacked:
                link.resend_due = now + link.pause
                self._look_at(link.resend_due)  # sooner than it was, if the pause had grown

    def _take_in(self, sender: Node, message: Message, now: float, effects: list[Effect]) -> None:
        try:
            self._hand_over(MessageArrived(sender, message), now, effects)
        except Refusal as refusal:
            self._refuse(refusal.of or sender, str(refusal), now, effects)

    def _hand_over(self, event: Event, now: float, effects: list[Effect]) -> None:
        if self._ended:
            return
        if type(event) is MessageArrived and type(event.message) is Placed and self._is_called(event.message):
            if self._admitted.get(event.message.node) != event.message.machine:  # from now on it is called there
                self._admitted[event.message.node] = event.message.machine
                effects.append(Admit(event.message.node, event.message.machine, event.message.address))
            return
        for effect in self.machine.on(event, now):
            if isinstance(effect, Send):
                if effect.to not in self._forgotten:
                    effects.append(self._send(effect, now))
                continue
            if isinstance(effect, Forget):
                self._forget(effect.node, effects)
            elif isinstance(effect, Admit):
                self._admitted[effect.node] = effect.machine
            elif (
                isinstance(effect, StartMember) and (link := self._links.get(effect.node)) is not None and link.unacked
            ):
                link.pause = RESEND_AFTER_S  # one of this name has died, with what it had not taken
                effects.append(effect)
                self._send_again(effect.node, link, now, effects)
                continue
            elif isinstance(effect, End):  # a node that leaves does not keep its peers resending
                self._ended = True
                for node, link in self._links.items():
                    _acknowledge(node, link, effects)
            effects.append(effect)

    def _is_called(self, placed: Placed) -> bool:
        """By whom this is. A nursery passes on where the coordinator is."""
        moves = placed.node == COORDINATOR and self.machine.node.role != "nursery"
        return placed.node.role == "shard" or moves

    def _forget(self, node: Node, effects: list[Effect]) -> None:
        self._admitted.pop(node, None)
        link = self._links.pop(node, None)
        if link is not None:  # who left in good order waits to hear that its last words have arrived
            _acknowledge(node, link, effects)
        self._forgotten[node] = None

    def _refuse(self, node: Node, why: str, now: float, effects: list[Effect]) -> None:
        if node == COORDINATOR or self.machine.node.role == "part":  # without it there is no run, or nobody to be told
            raise Refusal(f"{self.machine.node} refuses {node}: {why}")
        if node not in self._forgotten:
            self._forget(node, effects)
            effects.append(Forget(node))
            self._tell_coordinator(Refused(node, why), now, effects)

    def _tell_coordinator(self, message: Message, now: float, effects: list[Effect]) -> None:
        if self.machine.node == COORDINATOR:
            self._hand_over(MessageArrived(COORDINATOR, message), now, effects)
        elif not self._ended:
            effects.append(self._send(Send(COORDINATOR, message), now))

    def _send(self, send: Send, now: float) -> Transmit:
        link = self._link(send.to)
        if isinstance(send.message, UNORDERED):
            link.newest = send.message
            return Transmit(send.to, Frame(0, 0, send.message))
        link.sent += 1
        link.unacked.append((link.sent, send))
        link.ack_due = None
        if link.resend_due is None:
            link.resend_due = now + link.pause
            self._look_at(link.resend_due)
        return Transmit(send.to, Frame(link.sent, link.seen, send.message), send.payload)

    def _check(self, now: float, effects: list[Effect]) -> None:
        self._check_at = None
        for node, link in self._links.items():
            if link.resend_due is not None and now >= link.resend_due:
                self._send_again(node, link, now, effects)
            if link.ack_due is not None and now >= link.ack_due:
                _acknowledge(node, link, effects)
            for due in (link.resend_due, link.ack_due):
                if due is not None:
                    self._look_at(due)

    def _say_all_again(self, node: Node, link: Link, now: float, effects: list[Effect]) -> None:
        """What was under way may be lost."""
        link.pause = RESEND_AFTER_S
        if link.unacked:
            self._send_again(node, link, now, effects)
        if link.newest is not None:
            effects.append(Transmit(node, Frame(0, 0, link.newest)))

    def _send_again(self, node: Node, link: Link, now: float, effects: list[Effect]) -> None:
        for number, send in link.unacked:
            effects.append(Transmit(node, Frame(number, link.seen, send.message), send.payload, again=True))
        link.pause = min(2 * link.pause, RESEND_AT_MOST_S)
        link.resend_due = now + link.pause
        self._look_at(link.resend_due)
        link.ack_due = None

    def _ask_again(self, now: float, effects: list[Effect]) -> None:
        """Another process goes on behind these links: what was under way on them may be lost, both ways."""
        effects += [Admit(node, machine) for node, machine in self._admitted.items()]
        for node, link in self._links.items():
            self._say_all_again(node, link, now, effects)
            effects.append(Transmit(node, Frame(LOST, link.seen)))

    def _owe_ack(self, link: Link, now: float) -> None:
        if link.ack_due is None:
            link.ack_due = now + ACK_AFTER_S
            self._look_at(link.ack_due)

    def _look_at(self, due: float) -> None:
        if self._check_at is None or due < self._check_at:
            self._check_at = due

    def _link(self, node: Node) -> Link:
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = Link()
        return link


def _acknowledge(node: Node, link: Link, effects: list[Effect]) -> None:
    if link.ack_due is not None:
        effects.append(Transmit(node, Frame(0, link.seen)))
        link.ack_due = None
