"""A backup, of a shard or of the coordinator: takes what that has taken, and says nothing of it (`protocol.copied`)."""

from __future__ import annotations

import math
from collections import deque

from squall.protocol.copied import RECORDED, Attach, Copied, CopyTo
from squall.protocol.copy_messages import CopyJoined, CopyKept, Entry, Has, Whole
from squall.protocol.effects import AddPortions, Apply, CalculateVectors, Effect, End, Forget, Payload, Send, Transmit
from squall.protocol.events import CopyTaken, Event, MessageArrived, Started, TimePassed, VectorsCalculated, unpack
from squall.protocol.link import RESEND_AFTER_S
from squall.protocol.machine import Refusal
from squall.protocol.messages import Stop
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.succession import steps

REPEATED = (Apply, CalculateVectors, AddPortions, *RECORDED)  # of what it leads to: own numbers and record follow


def _repeated(effect: Effect) -> Effect | None:
    """What of this a backup does as well."""
    if isinstance(effect, Transmit) and effect.payload is not None and not effect.again:
        return Attach(effect.payload)  # what was brought to its place may be needed
    return effect if isinstance(effect, REPEATED) else None


class TakeCopy(Effect, frozen=True, gc=False):
    """Be what that was which is backed, or have the numbers that have come with this payload: `CopyTaken` answers."""

    payload: Payload


class Backup:
    """Makes a shard's updates again, or the coordinator's record. It ends when it is to take over, or that has."""

    def __init__(self, node: Node, pid: int = -1, address: str = "") -> None:
        """`address`: where that will be called which is backed, if it goes on here."""
        self.node = node
        self.copied: Copied | None = None
        self._of = COORDINATOR if node.role == "deputy" else Node("shard", node.index)
        self._joined = CopyJoined(pid, address)
        self._entries: deque[Entry | Whole] = deque()  # to be taken, one at a time
        self._part: Whole | None = None  # of a copy, the newest that is taken
        self._heard = 0  # the newest entry or part
        self._owed = 0  # steps of the last entry that are carried out when the next event is there
        self._has = 0  # the newest entry that it took
        self._say_at: float | None = None  # when it says that again, which may be lost

    def on(self, event: Event, now: float) -> list[Effect]:
        if self.copied is not None:
            self.copied.did(self._owed)
            self._owed = 0
        match event:
            case Started():
                return [Send(COORDINATOR, self._joined)]
            case MessageArrived(sender, Entry() | Whole() as entry):
                if sender != self._of or entry.number != self._heard + 1:
                    raise Refusal(f"it says what follows no {self._heard} of {self._of}: {entry.number}")
                self._heard = entry.number
                self._entries.append(entry)
                return self._enter(now)
            case CopyTaken(copied, whole):
                self.copied = copied or self.copied
                return self._taken(whole, now)
            case MessageArrived(_, Stop()):  # that may be gone, and acknowledges nothing
                return [Forget(self._of), End("finished")]
            case TimePassed() if self._entries:
                return self._enter(now)
            case VectorsCalculated():
                return []  # what comes of that here; what has come of it there is an entry
            case TimePassed():
                return [] if self._say_at is None or now < self._say_at else [self._say(now)]
        raise AssertionError(f"{self.node} does not know {event!r}")

    @property
    def wake_at(self) -> float | None:
        """At once, for entries that came before what they are about."""
        return -math.inf if self.copied is not None and self._entries else self._say_at

    def adds(self, event: Event) -> None:
        """Take what the one that is backed has not, as it will go on here."""
        assert self.copied is not None
        self.copied.did(self._owed)
        self._owed = 0  # what it leads to is carried out there
        self.copied.repeat(event, self.copied.now)

    def _taken(self, whole: bool, now: float) -> list[Effect]:
        assert self._part is not None
        if self._part.last and not whole:
            raise Refusal("it calls that all of which something lacks", of=self._of)
        self._has = max(self._has, self._part.number)
        return [self._say(now), *([Send(COORDINATOR, CopyKept())] if self._part.last else [])]

    def _say(self, now: float) -> Send:
        self._say_at = now + RESEND_AFTER_S
        return Send(self._of, Has(self._has))

    def _enter(self, now: float) -> list[Effect]:
        """Take the oldest. Its update first: what the shard says when it hears `Has` this must have made."""
        if not self._entries or (self.copied is None and self._part is not None):
            return []
        entry = self._entries.popleft()
        if isinstance(entry, Whole):
            self._part = entry
            payload = Payload("copy", self.node, entry.size, entry.number, self.node.index)
            return [TakeCopy(payload)] if entry.size else [End("finished")]  # it cannot have all
        if self.copied is None:
            raise Refusal("it says what has come to one of whom nothing is known")
        effects = self.copied.repeat(unpack(entry.kind, entry.event), entry.now)
        self._owed = sum(map(steps, effects))
        mine = [*filter(None, map(_repeated, effects))]
        ends = [effect for effect in effects if isinstance(effect, End)]
        if self._of == COORDINATOR and any(isinstance(effect, CopyTo) for effect in effects):  # it is none any more
            ends.append(End("finished"))
        self._has = entry.number
        return [*mine, self._say(now), *ends[:1]]
