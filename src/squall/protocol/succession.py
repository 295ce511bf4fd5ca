"""Who dies is succeeded: another process takes again the events that the dead one took, and goes on from there.

A machine is deterministic, so a journal is all that has to outlive it: each event, before any effect of it leaves, and
how many steps of its effects were carried out (Schneider, "Implementing fault-tolerant services using the state machine
approach", 1990). The journal is cut by keeping the state now and then, so that who has lived for a week is succeeded as
soon as who has lived for a minute.

A successor has the dead one's name and goes on behind the same links. It first carries out what was left of the last
event's effects, then sends again what nobody has acknowledged, and asks its peers for the same, since what had come to
the dead one and was not taken is lost. What its host had been asked for and had not answered, its machine asks for
again when it starts.

A shard that dies inside an update leaves numbers that are torn. They go back to a copy (`GoBack`) before anything else.
That update is then made on the copy: its pushes still lie in their slots, because nobody had an answer. The machine
stays where it is, but for what it knows of the updates between the copy and that one, which are lost (`NumbersTorn`).

Vectors of L-BFGS are never torn for good. Each change of them writes a vector that it does not read, and leaves a mark
when it is made, so a successor makes again what has no mark (`runtime.vectors`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from squall.protocol.answering.effects import WriteAnswers
from squall.protocol.effects import Apply, CalculateVectors, Effect, Send, Transmit, WritePiece, WriteSnapshot
from squall.protocol.events import Event, NumbersTorn
from squall.protocol.link import Linked
from squall.protocol.loss_messages import SnapshotLost
from squall.protocol.machine import Machine
from squall.protocol.messages import Exchanged, SnapshotPiece
from squall.protocol.unsaved import GoBack

# By machines, of their hosts, where nothing was answered.
ASKED_AGAIN = (WriteSnapshot, WritePiece, WriteAnswers, CalculateVectors)


class Journal(Protocol):
    """Where a death leaves it, so in memory that others have as well, or on a disk."""

    @property
    def full(self) -> bool:
        """It is to be cut before the next event: at first, by a successor, and where it has grown long."""

    def add(self, event: Event, now: float) -> None:
        """Of the event's effects no step is carried out yet."""

    def did(self, steps: int = 1) -> None:
        """So many more steps of the newest event's effects are carried out."""

    def cut(self, linked: Journaled) -> None:
        """Keep this state in the place of all events so far, whose effects are carried out."""


class Journaled(Linked):
    """A machine behind its links that can be succeeded."""

    def __init__(self, machine: Machine, journal: Journal) -> None:
        super().__init__(machine)
        self._journal = journal
        self._left: Sequence[Effect] = ()  # by the one before, to be carried out
        self._first = 0  # how many effects of the newest event are what was left, and come first
        self._succeeds = False
        self._torn: NumbersTorn | None = None  # by the one before

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_journal"}

    def did(self, steps: int = 1) -> None:
        self._journal.did(steps)

    def on(self, event: Event, now: float) -> list[Effect]:
        if self._journal.full:
            self._journal.cut(self)
        self._journal.add(event, now)
        return self._take(event, now)

    def _take(self, event: Event, now: float) -> list[Effect]:
        self._first = 0
        if not self._succeeds:
            return super().on(event, now)
        self._lose_files()
        back = self._go_back(now)
        effects, self._left, self._succeeds = [*back, *self._left], (), False
        self._first = len(effects)
        self._ask_again(now, effects)
        return effects + super().on(event, now)

    def _lose_files(self) -> None:
        """Those that were on their way to the coordinator were the dead process's own."""
        self._left = [effect for effect in self._left if not _is_piece(effect)]
        for node, link in self._links.items():
            for place, (number, send) in enumerate(link.unacked):
                if isinstance(send.message, SnapshotPiece):
                    link.unacked[place] = number, Send(node, SnapshotLost(send.message.number))

    def _go_back(self, now: float) -> list[Effect]:
        if self._torn is None:
            return []
        machine: Any = self.machine
        torn, self._torn, before = self._torn, None, machine.examples
        super().on(torn, now)  # what it says now is among what is sent again
        self._reduce(torn.last, before - machine.examples)
        return [GoBack(torn.version)]

    def _reduce(self, version: int, lost: int) -> None:
        """So many examples are not behind later weights than of this version, of which only answers to come tell."""
        self._left = [less(each, version, lost) if isinstance(each, Transmit) else each for each in self._left]
        for link in self._links.values():
            for place, (number, send) in enumerate(link.unacked):
                link.unacked[place] = number, replace(send, message=_reduced(send.message, version, lost))

    def take_again(
        self, events: Iterable[tuple[Event, float]], done: int, updates: int, journal: Journal,
        copied: int | None = None,
    ) -> list[tuple[Effect, float]]:  # fmt: skip
        """Go on behind these events. Returns the effects that are carried out, and when their events came.

        Of the last event's effects `done` steps are; the numbers have so many updates, or are torn behind them, and
        there is a copy with `copied`.
        """
        taken: list[tuple[Effect, float]] = []
        effects: list[Effect] = []
        at: float | None = None
        for event, now in events:
            taken += [(effect, at or 0.0) for effect in effects]
            effects, at = self._take(event, now), now
        rest = without(left(effects, done), updates, self.machine)
        if at is not None:  # else what the one before was to carry out is all still to do
            self._left = [effect for effect in rest if not isinstance(effect, ASKED_AGAIN)]
        on_its_way = any(isinstance(effect, GoBack) for effect in self._left[:1])
        if copied is not None and not on_its_way:
            self._torn = NumbersTorn(copied, updates)
        self._journal, self._succeeds = journal, True
        carried_out = len(effects) - len(rest)
        if rest and rest[0] is not effects[carried_out]:
            carried_out += 1  # a message that has not left: its numbers are at their place
        return [*taken, *((effect, at or 0.0) for effect in effects[:carried_out])]


def _is_piece(effect: Any) -> bool:
    """Its numbers are of a file, or it only brings those to their place."""
    payload = getattr(effect, "payload", None)
    return payload is not None and payload.kind == "piece"


def less(sent: Transmit, version: int, lost: int) -> Transmit:
    """The same, if so many examples are not behind later weights than of this version."""
    return replace(sent, frame=replace(sent.frame, message=_reduced(sent.frame.message, version, lost)))


def _reduced(message: Any, version: int, lost: int) -> Any:
    if isinstance(message, Exchanged) and message.version > version:
        return replace(message, examples=message.examples - lost)
    return message


def steps(effect: Effect) -> int:
    """Of carrying it out: a message's numbers are put into their place before it leaves."""
    return 2 if isinstance(effect, Transmit) and effect.payload is not None and not effect.again else 1


def left(effects: Sequence[Effect], done: int) -> list[Effect]:
    """What is left of effects of which so many steps are carried out."""
    for number, effect in enumerate(effects):
        if done < steps(effect):
            return [replace(effect, again=True) if done else effect, *effects[number + 1 :]]
        done -= steps(effect)
    return []


def without(effects: Sequence[Effect], updates: int, machine: Any) -> list[Effect]:
    """These effects but for updates that the numbers have already: it died before it could say so."""
    kept: list[Effect] = []
    to_make = sum(isinstance(effect, Apply) for effect in effects)
    if not to_make:
        return list(effects)
    surplus = updates - (machine.version - to_make)
    for effect in effects:
        if isinstance(effect, Apply) and surplus > 0:
            surplus -= 1
        else:
            kept.append(effect)
    return kept
