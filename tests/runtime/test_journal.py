"""A journal in memory: whenever its process dies, whoever reads it finds a whole one."""

from __future__ import annotations

from typing import Any

import pytest

from squall.errors import ProcessLost
from squall.protocol.effects import Effect, Payload, Send, Transmit
from squall.protocol.events import Event, FrameArrived, MessageArrived, Started
from squall.protocol.frames import Frame
from squall.protocol.messages import TakeSnapshot, ViewSeen
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.succession import Journaled
from squall.runtime import journal as journals
from squall.runtime.journal import Journal

WITH_NUMBERS = 99
WEIGHTS = Payload("weights", Node("replica", 0), 0, 1, 0)


class Counting:
    """Answers each message with how many it has taken, and has numbers to go with the answers to some."""

    node = Node("shard", 0)
    wake_at: float | None = None
    version = 0

    def __init__(self) -> None:
        self.taken: list[int] = []

    def on(self, event: Event, now: float) -> list[Effect]:
        if not isinstance(event, MessageArrived):
            return []
        assert isinstance(event.message, TakeSnapshot)
        self.taken.append(event.message.number)
        number = len(self.taken)
        return [Send(COORDINATOR, ViewSeen(number, ()), WEIGHTS if event.message.number == WITH_NUMBERS else None)]


class Watched:
    """A view of memory, which is copied whenever something was written."""

    def __init__(self, view: Any, memory: bytearray, copies: list[bytes]) -> None:
        self._view, self._memory, self._copies = view, memory, copies

    def __getitem__(self, place: Any) -> Any:
        return self._view[place]

    def __len__(self) -> int:
        return len(self._view)

    def __setitem__(self, place: Any, value: Any) -> None:
        self._view[place] = value
        self._copies.append(bytes(self._memory))


def arrived(number: int) -> FrameArrived:
    return FrameArrived(COORDINATOR, Frame(number, 0, TakeSnapshot(number)))


def successor(memory: bytes) -> tuple[Counting, int, int]:
    """What the machine has taken, messages sent by who died, and those that its successor sends at first."""
    journal = Journal(bytearray(memory))
    linked = journal.succeed(updates=0)
    sends = [effect for effect in linked.on(Started(), 0.0) if getattr(effect, "frame", Frame(0, 0)).message]
    assert isinstance(linked.machine, Counting)
    return linked.machine, len(journal.carried_out), len(sends)


def test_wherever_its_process_dies_each_event_is_there_as_a_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journals, "EVENTS_BYTES", 300)  # so that it is cut several times
    memory, copies = bytearray(Journal.size(1 << 12)), list[bytes]()
    journal: Any = Journal(memory)
    journal._bytes, journal._words = (Watched(view, memory, copies) for view in (journal._bytes, journal._words))
    linked, seen = Journaled(Counting(), journal), list[tuple[int, int]]()
    for number in range(1, 30):
        before = len(copies)
        for _ in linked.on(arrived(number), float(number)):
            linked.did()
        seen += [(number - 1, number)] * (len(copies) - before)
    first = next(i for i, copy in enumerate(copies) if Journal(bytearray(copy)).begun)
    for copy, (before, after) in list(zip(copies, seen))[first:]:
        machine, _, _ = successor(copy)
        assert len(machine.taken) in (before, after)
        assert machine.taken == list(range(1, len(machine.taken) + 1))


def test_what_was_not_carried_out_is_left_to_the_successor_and_what_was_is_sent_again() -> None:
    memory = bytearray(Journal.size(1 << 12))
    linked = Journaled(Counting(), Journal(memory))
    for number in (1, 2):
        (sent,) = linked.on(arrived(number), float(number))
        if number == 1:
            linked.did()
    _, carried_out, sends = successor(memory)
    assert carried_out == 1
    assert sends == 3  # the second for the first time, and both because nobody has acknowledged them
    assert sent


@pytest.mark.parametrize(("steps", "carried_out", "again"), [(0, 0, False), (1, 1, True), (2, 1, True)])
def test_numbers_that_were_at_their_place_count_as_carried_out(steps: int, carried_out: int, again: bool) -> None:
    memory = bytearray(Journal.size(1 << 12))
    linked = Journaled(Counting(), Journal(memory))
    linked.on(FrameArrived(COORDINATOR, Frame(1, 0, TakeSnapshot(WITH_NUMBERS))), 0.0)
    for _ in range(steps):
        linked.did()
    journal = Journal(bytearray(memory))
    sent = [effect for effect in journal.succeed().on(Started(), 0.0) if isinstance(effect, Transmit)]
    assert len(journal.carried_out) == carried_out
    assert sent[0].payload == WEIGHTS
    assert sent[0].again == again


def test_with_more_than_it_has_room_for_its_process_goes_on_and_is_not_succeeded() -> None:
    memory = bytearray(Journal.size(64))
    journal = Journal(memory)
    linked = Journaled(Counting(), journal)
    linked.on(arrived(1), 0.0)
    assert isinstance(linked.machine, Counting)
    linked.machine.taken = list(range(1 << 20))
    journal.cut(linked)
    assert linked.on(arrived(2), 0.0)
    with pytest.raises(ProcessLost, match="more to keep than there was room"):
        successor(memory)


def test_of_a_damaged_one_nobody_goes_on() -> None:
    memory = bytearray(Journal.size(1 << 12))
    Journaled(Counting(), Journal(memory)).on(arrived(1), 0.0)
    state = memory.index(b"Journaled")
    memory[state : state + 4] = b"rats"
    with pytest.raises(ProcessLost, match="damaged"):
        successor(memory)
