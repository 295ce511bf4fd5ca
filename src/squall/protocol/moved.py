"""Who goes on from a journal on another machine than before: in its backup's place (`protocol.copied`).

It is succession (`protocol.succession`), but for two things:

- Weights that were sent and not acknowledged do not lie there. Who has not got them says so, and is answered anew, with
  the newest ones.
- Its clock is another one, and goes on from where the last event's was.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

from msgspec.structs import replace

from squall.protocol.effects import Effect, Transmit
from squall.protocol.events import Event, FrameArrived, Moved, TimePassed
from squall.protocol.frames import HAVE, LOST, Frame
from squall.protocol.link import Link
from squall.protocol.machine import Machine
from squall.protocol.messages import Exchanged
from squall.protocol.nodes import Node
from squall.protocol.succession import Journal, Journaled


class Movable(Journaled):
    """A machine behind its links that can go on elsewhere."""

    def __init__(self, machine: Machine, journal: Journal) -> None:
        super().__init__(machine, journal)
        self._now = self._ahead = 0.0  # of the last event; and how far this clock is ahead of the process's own
        self._moves = False  # who goes on from this is on another machine
        self._unheard: dict[Node, None] = {}  # there: who has not said yet what has come of what it was sent

    @property
    def now(self) -> float:
        """When the last event came, by the clock of whoever has taken it."""
        return self._now

    def reads(self, clock: float) -> float:
        """What the process's own clock says, as the machine is told."""
        return self._now if self._moves else clock + self._ahead

    @property
    def wake_at(self) -> float | None:
        at = super().wake_at
        return None if at is None else at - self._ahead

    def on(self, event: Event, now: float) -> list[Effect]:
        if self._succeeds and self._moves:
            self._ahead = self._now - now
        at = super().wake_at if type(event) is TimePassed else None
        due = at is not None and at - self._ahead <= now
        return super().on(event, max(now + self._ahead, at or 0.0) if due else now + self._ahead)  # whatever is rounded

    def repeat(self, event: Event, now: float) -> list[Effect]:
        """In a backup: what the one that is backed has taken at this time of its own clock."""
        return super().on(event, now)

    def journal_into(self, journal: Journal) -> None:
        """In a backup: it has another one there, from which somebody may go on at once."""
        self._journal = journal
        journal.cut(self)

    def _take(self, event: Event, now: float) -> list[Effect]:
        self._now = now
        effects = self._move(event, now) if self._succeeds and self._moves else super()._take(event, now)
        return self._settle_answers(event, effects) if self._unheard else effects

    def _bare(self) -> bytes:
        """This, as it goes on elsewhere."""
        other = copy.copy(self)
        other._moves = True
        return pickle.dumps(other, pickle.HIGHEST_PROTOCOL)

    def _move(self, event: Event, now: float) -> list[Effect]:
        """The first event that takes who goes on in a backup's place."""
        self._moves = False
        self._left = [each for each in self._left if not isinstance(each, Transmit)]  # what lacks is sent again
        self._lose_files()
        for node, link in self._links.items():
            if any(send.payload is not None for _, send in link.unacked):
                self._unheard[node] = None
        effects: list[Effect] = []
        super()._hand_over(Moved(), now, effects)
        self._unheard = {node: None for node in self._unheard if node in self._links}  # others are forgotten
        return effects + super()._take(event, now)

    def _settle_answers(self, event: Event, effects: list[Effect]) -> list[Effect]:
        """Weights that were sent and not acknowledged do not lie here: what has come of them, their receiver must say.

        Then it waits for the others, and nobody computes on what is there. They are sent anew, with the newest weights.
        """
        found: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Transmit) and effect.to in self._unheard and effect.payload is not None:
                effect = Transmit(effect.to, Frame(LOST, effect.frame.seen))
            found.append(effect)
        # A copy of something may have been on its way before it was asked.
        if type(event) is FrameArrived and event.sender in self._unheard and event.frame.number == HAVE:
            del self._unheard[event.sender]
            if (link := self._links.get(event.sender)) is not None:
                found += self._anew(event.sender, link)
        return found

    def _anew(self, node: Node, link: Link) -> list[Effect]:
        shard: Any = self.machine
        found: list[Effect] = []
        for place, (number, send) in enumerate(link.unacked):
            if send.payload is not None and isinstance(send.message, Exchanged):
                message = replace(send.message, version=shard.version, examples=shard.examples)
                send = replace(send, message=message, payload=replace(send.payload, version=shard.version))
                link.unacked[place] = number, send
            found.append(Transmit(node, Frame(number, link.seen, send.message), send.payload))
        return found
