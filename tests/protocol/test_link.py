"""Two machines behind their links, and a wire that a test can tamper with."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from squall.protocol.check import check
from squall.protocol.copy_messages import Has
from squall.protocol.effects import Effect, End, Forget, Send, Transmit
from squall.protocol.events import (
    Event,
    FrameArrived,
    MessageArrived,
    PeerReached,
    PeerRefused,
    PeersHeard,
    StopRequested,
    TimePassed,
)
from squall.protocol.frames import LOST, Frame
from squall.protocol.link import ACK_AFTER_S, EARLY_AT_MOST, RESEND_AFTER_S, RESEND_AT_MOST_S, Linked
from squall.protocol.machine import Refusal
from squall.protocol.messages import Dropped, Join
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.nursery_messages import Heard, Refused

A, B = Node("replica", 0), Node("shard", 0)


@dataclass
class Talker:
    """Sends Join(n) for each StopRequested("n"), remembers what it hears, and echoes it if asked to."""

    node: Node
    peer: Node
    echoes: bool = False
    heard: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    wake_at: float | None = None
    ended: bool = False

    def on(self, event: Event, now: float) -> list[Effect]:
        assert not self.ended, "an ended machine is left alone"
        self.events.append(event)
        match event:
            case StopRequested("end"):
                self.ended = True
                return [End("finished")]
            case StopRequested("forget"):
                return [Forget(self.peer)]
            case StopRequested(number):
                return [Send(self.peer, Join(int(number)))]
            case MessageArrived(_, Join(-1)):
                raise Refusal("that is said by nobody")
            case MessageArrived(_, Join(pid)):
                self.heard.append(pid)
                return [Send(self.peer, Dropped(pid))] if self.echoes else []
        return []


class Wire:
    """Two linked talkers; frames wait in `flying` until a test delivers, drops or copies them."""

    def __init__(self, echoes: bool = False) -> None:
        self.talkers = {A: Talker(A, B), B: Talker(B, A, echoes)}
        self.linked = {node: Linked(talker) for node, talker in self.talkers.items()}
        self.flying: list[tuple[Node, FrameArrived]] = []
        self.now = 0.0

    def give(self, node: Node, event: Event) -> list[Effect]:
        effects = self.linked[node].on(event, self.now)
        check(self.linked[node])
        self.flying += [(e.to, FrameArrived(node, e.frame)) for e in effects if isinstance(e, Transmit)]
        return effects

    def say(self, node: Node, *numbers: int) -> None:
        for number in numbers:
            self.give(node, StopRequested(str(number)))

    def deliver(self, index: int = 0) -> list[Effect]:
        return self.give(*self.flying.pop(index))

    def wake(self) -> list[Effect]:
        """Let the time of whoever is next come."""
        node = min((n for n in self.linked if self.linked[n].wake_at is not None), key=lambda n: self.linked[n].wake_at)
        self.now = self.linked[node].wake_at
        return self.give(node, TimePassed())

    def heal(self) -> None:
        """A wire that works again, for as long as anybody has something to say."""
        while self.flying or any(linked.wake_at is not None for linked in self.linked.values()):
            self.deliver() if self.flying else self.wake()


def test_messages_arrive_in_the_order_of_sending() -> None:
    wire = Wire()
    wire.say(A, 1, 2, 3)
    wire.deliver(2)
    wire.deliver(1)
    assert wire.talkers[B].heard == []
    wire.deliver()
    assert wire.talkers[B].heard == [1, 2, 3]


def test_a_copy_is_dropped_and_only_acknowledged() -> None:
    wire = Wire()
    wire.say(A, 1)
    wire.flying *= 3
    wire.heal()
    assert wire.talkers[B].heard == [1]
    assert wire.linked[A].unacknowledged == 0


def test_numbers_that_come_with_a_copy_are_not_taken() -> None:
    """Their place may be in use: those of the first have been taken, also where a gap holds its message."""
    wire = Wire()
    wire.say(A, 1, 2, 3)
    wire.deliver(2)
    wire.deliver()
    assert [wire.linked[B].takes(A, number) for number in (1, 2, 3, 4)] == [False, True, False, True]
    wire.give(B, StopRequested("forget"))
    assert not wire.linked[B].takes(A, 2)


def test_who_says_what_is_refused_is_heard_no_more_and_the_coordinator_knows() -> None:
    """What came before it counts, also where all of it was held for a gap."""
    wire = Wire(echoes=True)
    wire.say(A, 1, -1, 2)
    wire.deliver(2)
    wire.deliver(1)
    effects = wire.deliver()
    assert wire.talkers[B].heard == [1]
    told = Transmit(COORDINATOR, Frame(1, 0, Refused(A, "that is said by nobody")))
    assert [effect for effect in effects if effect in (Forget(A), told)] == [Forget(A), told]
    wire.say(A, 3)
    wire.deliver(-1)
    assert wire.talkers[B].heard == [1]


def test_what_a_connection_has_found_is_told_to_the_coordinator() -> None:
    wire = Wire()
    effects = [*wire.give(B, PeersHeard((A,))), *wire.give(B, PeerRefused(A, "nonsense"))]
    said = [effect.frame.message for effect in effects if isinstance(effect, Transmit)]
    assert said == [Heard((A,)), Refused(A, "nonsense")]
    assert wire.give(B, PeerRefused(A, "nonsense")) == [], "once"


def test_a_coordinator_tells_itself() -> None:
    talker = Talker(COORDINATOR, A)
    Linked(talker).on(PeerRefused(A, "nonsense"), 0.0)
    assert talker.events == [MessageArrived(COORDINATOR, Refused(A, "nonsense"))]


def test_what_has_no_number_acknowledges_nothing_and_the_newest_of_it_is_said_again() -> None:
    """Whoever says it may have taken what its backup has not."""

    class Backing(Talker):
        def on(self, event: Event, now: float) -> list[Effect]:
            match event:
                case StopRequested(number):
                    return [Send(self.peer, Has(int(number)))]
            return super().on(event, now)

    linked = Linked(Backing(A, B))
    linked.on(FrameArrived(B, Frame(1, 0, Join(7))), 0.0)
    for number in ("1", "2"):
        (said,) = linked.on(StopRequested(number), 0.0)
        assert isinstance(said, Transmit)
        assert said.frame == Frame(0, 0, Has(int(number)))
    newest = Transmit(B, Frame(0, 0, Has(2)))
    assert newest in linked.on(PeerReached(B), 0.0)
    assert newest in linked.on(FrameArrived(B, Frame(LOST, 0)), 0.0)
    assert newest not in linked.on(TimePassed(), RESEND_AFTER_S)


def test_what_should_have_a_number_is_refused_without_one() -> None:
    linked = Linked(Talker(A, B))
    effects = linked.on(FrameArrived(B, Frame(0, 0, Join(7))), 0.0)
    assert Forget(B) in effects
    assert any(isinstance(each, Transmit) and isinstance(each.frame.message, Refused) for each in effects)


def test_a_reply_acknowledges() -> None:
    wire = Wire(echoes=True)
    wire.say(A, 1)
    wire.deliver()
    assert [frame.frame for _, frame in wire.flying] == [Frame(1, 1, Dropped(1))]
    wire.deliver()
    assert wire.linked[A].unacknowledged == 0
    assert wire.linked[B].unacknowledged == 1


def test_without_a_reply_the_acknowledgement_goes_alone() -> None:
    wire = Wire()
    wire.say(A, 1)
    wire.deliver()
    assert wire.flying == []
    assert wire.linked[B].wake_at == ACK_AFTER_S
    wire.wake()
    assert [frame.frame for _, frame in wire.flying] == [Frame(0, 1)]
    wire.deliver()
    assert wire.linked[A].unacknowledged == 0
    assert wire.linked[B].wake_at is None


def test_what_is_not_acknowledged_is_sent_again_at_doubling_intervals() -> None:
    wire = Wire()
    wire.say(A, 1, 2)
    pauses, last = [], 0.0
    for _ in range(6):
        wire.flying.clear()
        again = wire.wake()
        assert [(e.frame.number, e.again) for e in again if isinstance(e, Transmit)] == [(1, True), (2, True)]
        pauses.append(wire.now - last)
        last = wire.now
    assert pauses == [RESEND_AFTER_S, 2 * RESEND_AFTER_S, 4 * RESEND_AFTER_S] + [RESEND_AT_MOST_S] * 3


def test_an_answer_ends_the_long_pauses() -> None:
    wire = Wire()
    wire.say(A, 1, 2)
    while wire.now < 3 * RESEND_AT_MOST_S:
        wire.flying.clear()
        wire.wake()
    wire.give(A, FrameArrived(B, Frame(0, 1)))
    heard_at = wire.now
    wire.flying.clear()
    wire.wake()
    assert wire.now == heard_at + RESEND_AFTER_S
    assert [frame.frame.number for _, frame in wire.flying] == [2]


def test_a_forgotten_peer_gets_a_last_acknowledgement_and_is_then_neither_heard_nor_sent_to() -> None:
    wire = Wire()
    wire.say(A, 1)
    wire.say(B, 7)
    wire.deliver()
    wire.flying.clear()
    wire.give(B, StopRequested("forget"))
    assert [frame.frame for _, frame in wire.flying] == [Frame(0, 1)]
    wire.flying.clear()
    assert wire.linked[B].unacknowledged == 0
    wire.say(A, 2)
    wire.deliver()
    wire.say(B, 8)
    assert wire.flying == []
    assert wire.talkers[B].heard == [1]
    assert wire.linked[B].unacknowledged == 0


def test_the_end_acknowledges_what_was_heard_and_still_serves_the_links() -> None:
    wire = Wire()
    wire.say(A, 1)
    wire.deliver()
    wire.say(B, 7)
    wire.flying.clear()  # the 7 is lost
    wire.give(B, FrameArrived(A, Frame(2, 0, Join(2))))
    effects = wire.give(B, StopRequested("end"))
    assert [(e.frame if isinstance(e, Transmit) else e) for e in effects] == [Frame(0, 2), End("finished")]
    wire.say(A, 2, 3)  # the machine that has ended hears of nothing
    wire.heal()
    assert wire.talkers[A].heard == [7]
    assert wire.talkers[B].heard == [1, 2]
    assert wire.linked[B].unacknowledged == wire.linked[A].unacknowledged == 0


def test_who_has_ended_acknowledges_at_once_because_it_may_be_gone_later() -> None:
    wire = Wire()
    wire.say(B, 7)
    wire.deliver()
    wire.give(B, StopRequested("end"))
    wire.flying.clear()
    assert wire.give(B, FrameArrived(A, Frame(1, 1, Join(1)))) == [Transmit(A, Frame(0, 1))]


def test_time_is_handed_on_when_the_machine_wants_it() -> None:
    wire = Wire()
    wire.say(A, 1)
    wire.talkers[A].wake_at = 0.25
    assert wire.linked[A].wake_at == 0.25
    wire.now = 0.25
    wire.give(A, TimePassed())
    assert isinstance(wire.talkers[A].events[-1], TimePassed)
    wire.talkers[A].wake_at = 9.0
    wire.flying.clear()
    wire.now = RESEND_AFTER_S
    wire.give(A, TimePassed())
    assert len(wire.flying) == 1
    assert sum(isinstance(event, TimePassed) for event in wire.talkers[A].events) == 1


def test_early_messages_are_bounded_and_come_again() -> None:
    wire = Wire()
    wire.say(A, *range(EARLY_AT_MOST + 10))
    first = wire.flying.pop(0)
    while wire.flying:
        wire.deliver()
    wire.flying.append(first)
    wire.deliver()
    assert wire.talkers[B].heard == list(range(EARLY_AT_MOST + 1))
    wire.heal()
    assert wire.talkers[B].heard == list(range(EARLY_AT_MOST + 10))


actions = st.tuples(st.sampled_from(["say A", "say B", "deliver", "drop", "copy", "wake"]), st.integers(0, 99))


@given(st.lists(actions, max_size=60), st.booleans())
def test_whatever_the_wire_does_each_message_arrives_once_and_in_order(plan: list[tuple[str, int]], echo: bool) -> None:
    wire = Wire(echo)
    said: dict[Node, list[int]] = {A: [], B: []}
    for step, (what, pick) in enumerate(plan):
        if what.startswith("say"):
            node = A if what.endswith("A") else B
            said[node].append(step)
            wire.say(node, step)
        elif what == "wake" and any(linked.wake_at is not None for linked in wire.linked.values()):
            wire.wake()
        elif wire.flying and what != "wake":
            index = pick % len(wire.flying)
            if what == "copy":
                wire.flying.append(wire.flying[index])
            elif what == "drop":
                wire.flying.pop(index)
            else:
                wire.deliver(index)
    wire.heal()
    assert wire.talkers[B].heard == said[A]
    assert wire.talkers[A].heard == said[B]
    heard = [event.message for event in wire.talkers[A].events if isinstance(event, MessageArrived)]
    assert [message.lease for message in heard if isinstance(message, Dropped)] == (said[A] if echo else [])
    assert wire.linked[A].unacknowledged == wire.linked[B].unacknowledged == 0
