"""Shards that die, also between two steps of what an event has them do, or inside an update, and are succeeded."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

from squall.protocol.effects import AddPortions, Apply, CalculateVectors, Effect, Transmit
from squall.protocol.events import Event
from squall.protocol.nodes import NURSERY, Node
from squall.protocol.notes import Note
from squall.protocol.succession import Journaled, steps
from squall.protocol.unsaved import GoBack
from squall.runtime.driver import Host
from squall.runtime.journal import Journal
from squall.sim.proof.broken import Broken
from squall.sim.proof.coordinator_phantom import CoordinatorPhantom
from squall.sim.proof.faults import Fault, Kill, Role

STATE_BYTES = 1 << 18
CHANGES = Apply | CalculateVectors | AddPortions  # of a shard's numbers
ALL_DIE = 0.1  # of the worlds lose the first machine, or all processes of the only one


def deaths_of_shards(seed: int, shards: int, events: int) -> tuple[Fault, ...]:
    chance = random.Random(f"{seed} deaths of shards")  # of its own: all else of a seed's world stays as it was
    found: list[Fault] = []
    for _ in range(chance.choice((0, 0, 1, 2, 3)) if shards else 0):
        within, untold = chance.choice((None, 0, 1, 2, 3, 4, 6)), chance.random() < 0.5
        start_s, shard = chance.choice((0.0, 0.0, 0.05)), Role("shard", chance.randrange(shards))
        found.append(Kill(chance.randrange(events), shard, start_s, steps=within, untold=untold))
    return tuple(found)


def all_die(seed: int, events: int) -> tuple[Fault, ...]:
    chance = random.Random(f"{seed} all die")
    return (Kill(chance.randrange(events), Role.of(NURSERY)),) if chance.random() < ALL_DIE else ()


def others(seed: int, shards: int, events: int) -> tuple[Fault, ...]:
    """They come to what a world has, which stays as it was."""
    deaths = deaths_inside_updates(seed, shards, events) + deaths_as_journals_are_cut(seed, shards, events)
    return deaths + all_die(seed, events)


def deaths_inside_updates(seed: int, shards: int, events: int) -> tuple[Fault, ...]:
    chance = random.Random(f"{seed} deaths inside updates")
    found: list[Fault] = []
    for _ in range(chance.choice((0, 0, 1, 2, 3)) if shards else 0):
        start_s, shard = chance.choice((0.0, 0.0, 0.05)), Role("shard", chance.randrange(shards))
        found.append(Kill(chance.randrange(events), shard, start_s, steps=chance.choice((0, 0, 1)), torn=True))
    return tuple(found)


def deaths_behind_changes(seed: int, shards: int, events: int) -> tuple[Fault, ...]:
    chance = random.Random(f"{seed} deaths behind changes")
    at = [chance.randrange(events) for _ in range(chance.choice((0, 1, 2)))]
    return tuple(Kill(each, Role("shard", chance.randrange(shards)), steps=0, untold=True, torn=True) for each in at)


def deaths_of_coordinators(seed: int, events: int) -> tuple[Fault, ...]:
    chance = random.Random(f"{seed} deaths of coordinators")  # of its own, too
    found: list[Fault] = []
    for _ in range(chance.choice((0, 0, 0, 1, 2))):
        within, untold = chance.choice((None, 0, 1, 2, 3, 5)), chance.random() < 0.5
        start_s = chance.choice((0.0, 0.0, 0.05))
        found.append(Kill(chance.randrange(events), Role("coordinator"), start_s, steps=within, untold=untold))
    return tuple(found)


class Retelling:
    """What the coordinator does: who goes on in another's place may do the last of it again, and it counts once."""

    def __init__(self) -> None:
        self._notes: list[Effect] = []
        self._sent: dict[Node, int] = {}

    def goes_on(self, first: int, said: Sequence[Effect]) -> list[Effect]:
        """In a deputy's place, which has said this behind so many notes. Returns what nobody has heard yet."""
        known = self._notes[first:]
        found = [effect for effect in said if isinstance(effect, Note)]
        if repr(found[: len(known)]) != repr(known):
            raise Broken("I26", f"behind {first} notes it has {found[: len(known)]}, and told is {known}")
        fresh: list[Effect] = [*found[len(known) :]]
        self._notes += fresh
        return fresh

    @property
    def notes(self) -> list[Any]:
        return list(self._notes)

    def repeats(self, host: Host, what: object) -> bool:
        if isinstance(what, Transmit):
            number, newest = what.frame.number, self._sent.get(what.to, 0)
            self._sent[what.to] = max(number, newest)
            return not what.again and 0 < number <= newest
        if not isinstance(what, Note):
            return False
        number = cast("CoordinatorPhantom", host).told
        if number < len(self._notes):
            if repr(self._notes[number]) != repr(what):  # NaN is not NaN
                raise Broken("I20", f"{what} is told in place of {self._notes[number]}")
            return True
        if number > len(self._notes):
            raise Broken("I20", f"{what} is told after {number} others, of which {len(self._notes)} are known")
        self._notes.append(what)
        return False


def deaths_as_journals_are_cut(seed: int, shards: int, events: int) -> tuple[Fault, ...]:
    """Of who succeeds somebody: only then is a journal cut in so short a run, but for its beginning."""
    chance = random.Random(f"{seed} deaths at cuts")
    found: list[Fault] = []
    for _ in range(chance.choice((0, 0, 0, 1, 2))):
        roles = [Role("coordinator"), *(Role("shard", index) for index in range(shards))]
        at, role = chance.randrange(events), chance.choice(roles)
        found += [Kill(at, role, cut=True), Kill(at + 1, role, steps=chance.choice((0, 1, 2)))]
    return tuple(found)


def copies_every(seed: int, faults: Sequence[Fault]) -> int:
    """Updates from one copy of a shard's numbers to the next; 0: there are none, since nobody will need one."""
    torn = any(isinstance(fault, Kill) and fault.torn and not fault.untold for fault in faults)
    return random.Random(f"{seed} copies").choice((1, 2, 3, 5, 8, 1000)) if torn else 0


class MortalJournal(Journal):
    def __init__(self) -> None:
        super().__init__(bytearray(self.size(STATE_BYTES)))
        self.dies_after: int | None = None  # steps of the effects of an event that has so many
        self.untold = False  # the last of them is not in the journal
        self.dies_cut = False  # it dies when this has been cut
        self.tears = False  # it dies inside an update of such an event, or where that is untold
        self.torn: Effect | None = None  # so the numbers are, by this
        self.dead = False  # by that

    def most(self, effects: Sequence[Effect]) -> int | None:
        """Steps of these that it does, if it dies then."""
        if not self.tears or self.dies_after is None:
            return self.dies_after
        updates = [place for place, effect in enumerate(effects) if isinstance(effect, CHANGES)]
        if not updates:
            return None
        return sum(map(steps, effects[: updates[self.dies_after % len(updates)] + self.untold]))

    def mended_by(self, effects: Sequence[Effect]) -> None:
        if any(isinstance(effect, GoBack) for effect in effects):
            self.torn = None


class Mortal(Journaled):
    """In a world all effects of an event are carried out at once, or those before its death."""

    _journal: MortalJournal

    def on(self, event: Event, now: float) -> list[Effect]:
        journal = self._journal
        if journal.full and journal.dies_cut:
            journal.cut(self)
            journal.dead, journal.dies_cut = True, False
            return []
        effects = super().on(event, now)
        total, most = sum(map(steps, effects)), journal.most(effects)
        if most is None or total < most or not total:
            journal.did(total)
            journal.mended_by(effects)
            return effects
        journal.dead, journal.dies_after = True, None
        carried_out: list[Effect] = []
        rest = most
        for effect in effects:
            if rest <= 0:
                break
            rest -= steps(effect)  # of a message that has not left the numbers are there: it may as well be lost
            carried_out.append(effect)
        journal.mended_by(carried_out)
        if journal.tears and not journal.untold:
            journal.torn = effects[len(carried_out)]
        journal.did(most - (journal.untold and most > 0 and rest == 0))
        return carried_out


def dies_within(journals: Mapping[Node, MortalJournal], fault: Kill) -> bool:
    """Somebody will, in an event that has more steps; False: it dies at once."""
    journal = journals.get(Node(fault.part.role, fault.part.index))
    if journal is not None and fault.cut:
        journal.dies_cut = True
        return True
    if fault.steps is None or journal is None:
        return False
    journal.dies_after, journal.untold, journal.tears = fault.steps, fault.untold, fault.torn
    return True


def fallen(journals: Mapping[Node, MortalJournal]) -> list[Node]:
    """Who has died so."""
    found = [node for node, journal in journals.items() if journal.dead]
    for node in found:
        journals[node].dead = False
    return found


def spare(journals: Mapping[Node, MortalJournal]) -> None:
    """The run is over: nobody would be succeeded."""
    for journal in journals.values():
        journal.dies_after, journal.dies_cut = None, False
