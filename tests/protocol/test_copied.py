"""What a machine that is copied sends, and when: here its backup is a test."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.protocol.backup import Backup
from squall.protocol.copied import Copied, CopyMore, CopyTo
from squall.protocol.copy_messages import Entry, Has, Whole
from squall.protocol.effects import Effect, End, Forget, Send, Transmit
from squall.protocol.events import (
    CopyKnown,
    Event,
    FrameArrived,
    MessageArrived,
    PeerReached,
    PeerRefused,
    StopRequested,
    TimePassed,
)
from squall.protocol.frames import Frame
from squall.protocol.machine import Refusal
from squall.protocol.messages import Join
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.nursery_messages import Refused

SHARD, BACKUP, PEER = Node("shard", 0), Node("backup", 0), Node("replica", 0)


class Speaker:
    """Says Join(n) to its peer for each StopRequested("n")."""

    node = SHARD
    wake_at = None

    def on(self, event: Event, now: float) -> list[Effect]:
        match event:
            case StopRequested("copy"):
                return [CopyTo(BACKUP, 1)]
            case StopRequested("part"):
                return [CopyTo(None)]
            case StopRequested("forget"):
                return [Forget(PEER)]
            case StopRequested(number):
                return [Send(PEER, Join(int(number)))]
        return []


class NoJournal:
    full = False

    def add(self, event: Event, now: float) -> None: ...

    def did(self, steps: int = 1) -> None: ...

    def cut(self, linked: Any) -> None: ...


class Line:
    """The peer's connections: as `transports.streams`, each carries a number once, and none behind a higher one."""

    def __init__(self) -> None:
        self.copied = Copied(Speaker(), NoJournal())
        self.entries = self.last = self.taken = 0
        self.up, self.now = True, 0.0
        self.give(StopRequested("copy"))
        self.give(CopyKnown(BACKUP, 1))

    def give(self, event: Event) -> None:
        for effect in self.copied.on(event, self.now):
            if isinstance(effect, Transmit) and effect.to == BACKUP and type(effect.frame.message) is Entry:
                self.entries = effect.frame.message.number
            if isinstance(effect, Transmit) and effect.to == PEER and self.up:
                self.carry(effect.frame)

    def carry(self, frame: Frame) -> None:
        if frame.number > self.last:
            assert frame.number == self.last + 1, "a connection has gaps, which nothing would fill"
            self.last, self.taken = frame.number, max(self.taken, frame.number)

    def has(self, entry: int) -> None:
        self.give(FrameArrived(BACKUP, Frame(0, 0, Has(entry))))

    def wait(self) -> None:
        """Until all is sent again."""
        self.now += 10.0
        self.give(TimePassed())

    def reach(self) -> None:
        """Another connection, on which all begins that the peer has not acknowledged: it has done so with nothing."""
        self.up, self.last = True, 0
        self.give(PeerReached(PEER))


@given(st.lists(st.sampled_from(["say", "say", "has", "break", "reach", "wait"]), max_size=30))
def test_a_connection_carries_all_in_order_whatever_waits_for_the_backup(plan: list[str]) -> None:
    line, said = Line(), 0
    for step in plan:
        if step == "say":
            said += 1
            line.give(StopRequested(str(said)))
        elif step == "has":
            line.has(line.entries // 2 + 1)
        elif step == "wait":
            line.wait()
        elif step == "break":
            line.up = False
        elif not line.up:
            line.reach()
    line.reach()
    line.has(line.entries)
    assert line.taken == said


def test_who_leaves_hears_the_last_word_that_waits_for_the_backup() -> None:
    line = Line()
    line.give(StopRequested("1"))
    assert not any(isinstance(effect, Forget) for effect in line.copied.on(StopRequested("forget"), 0.0))
    *said, forget = line.copied.on(FrameArrived(BACKUP, Frame(0, 0, Has(line.entries + 1))), 0.0)
    assert [effect.frame.message for effect in said if isinstance(effect, Transmit)] == [Join(1)]
    assert forget == Forget(PEER)


class Copy:
    """A backup is made, in parts: numbers of what it is sent, in turn, and which of them are parts."""

    def __init__(self) -> None:
        self.copied = Copied(Speaker(), NoJournal())
        self.sent: list[int] = []
        self.parts: list[int] = []
        self.asked: list[CopyTo | CopyMore] = []
        self.give(StopRequested("copy"))

    def give(self, event: Event) -> None:
        for effect in self.copied.on(event, 0.0):
            if isinstance(effect, CopyTo | CopyMore):
                self.asked.append(effect)
            if isinstance(effect, Transmit) and isinstance(message := effect.frame.message, Entry | Whole):
                self.sent.append(message.number)
                self.parts += [message.number] if isinstance(message, Whole) else []


@given(st.lists(st.sampled_from(["say", "ready", "has"]), max_size=30))
def test_a_part_of_a_copy_is_where_it_was_asked_for_among_the_entries(plan: list[str]) -> None:
    """Whatever comes before it is ready. One is asked for at a time, when the backup has the one before."""
    copy, ready = Copy(), 0
    for step in plan:
        if step == "say":
            copy.give(StopRequested("1"))
        elif step == "ready" and ready < len(copy.asked):
            ready += 1
            copy.give(CopyKnown(BACKUP, 1, last=False))
        elif step == "has" and copy.sent:
            copy.give(FrameArrived(BACKUP, Frame(0, 0, Has(copy.sent[-1]))))
    assert copy.sent == [*range(1, 1 + len(copy.sent))]
    assert [asked.number for asked in copy.asked[: len(copy.parts)]] == copy.parts
    assert ready <= len(copy.asked) <= ready + 1


def test_what_another_backup_has_counts_for_nothing_and_too_much_is_refused() -> None:
    line = Line()
    line.give(StopRequested("1"))
    line.give(FrameArrived(Node("backup", 1), Frame(0, 0, Has(line.entries))))
    assert line.taken == 0
    with pytest.raises(Refusal, match="it has entry 9"):
        line.copied._on_has(9, 0.0, [])
    line.has(line.entries)
    assert line.taken == 1


def test_a_whole_backup_that_is_refused_is_told_of_beside_what_waits_and_again_until_it_is_parted_with() -> None:
    """What is numbered stays: the backup, which has heard nothing of it, may go on all the same."""
    line = Line()
    line.give(StopRequested("1"))
    told = Transmit(COORDINATOR, Frame(0, 0, Refused(BACKUP, "it lies")))
    assert line.copied.on(PeerRefused(BACKUP, "it lies"), 0.0) == [Forget(BACKUP), told]
    line.has(line.entries)
    assert line.taken == 0
    line.now = 10.0
    assert line.copied.on(TimePassed(), line.now) == [told]
    line.give(StopRequested("part"))
    assert line.taken == 1
    line.now = 20.0
    assert told not in line.copied.on(TimePassed(), line.now)


def test_a_backup_that_cannot_be_given_all_ends_and_nobody_waits_for_it() -> None:
    copy = Copy()
    copy.give(StopRequested("1"))
    copy.give(CopyKnown(BACKUP, 0))
    assert copy.sent == [1], "that there is nothing"
    assert copy.copied.backup is None
    assert not copy.copied.held
    backup = Backup(BACKUP)
    assert backup.on(MessageArrived(SHARD, Whole(1, 0)), 0.0) == [End("finished")]


@pytest.mark.parametrize(
    ("sender", "said"),
    [(SHARD, Whole(2, 1)), (Node("shard", 1), Whole(1, 1)), (SHARD, Entry(1, 0, b"", 0.0))],
)
def test_a_backup_refuses_what_does_not_follow(sender: Node, said: Any) -> None:
    with pytest.raises(Refusal):
        Backup(BACKUP).on(MessageArrived(sender, said), 0.0)
