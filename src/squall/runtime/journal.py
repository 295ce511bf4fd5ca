"""A journal in memory that outlives its process: events, how far the last one's effects are, and now and then a state.

    header   two int64: which half is in use; the newest event's number << 24 | steps of its effects that are done
             one for each half: updates and answers since its state that are in the schedule; 1 where there was no room
    a half   int64 size, state, pickled; then events, each as int64 size, its number, when, which kind, msgpack; a size
             of 0 ends them

What is written counts by one store of eight bytes behind it, so whenever a process dies there is a whole journal. It is
this machine's own memory, into which nobody else writes. Where something has no room here, nobody can go on from it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from mmap import mmap
from struct import Struct

from squall.errors import ProcessLost
from squall.protocol.effects import Effect
from squall.protocol.events import Event, pack, unpack
from squall.protocol.succession import Journaled

EVENTS_BYTES = 1 << 18  # taken again within some 20 ms
STATE_BYTES = 1 << 24  # pages that nobody has touched are none
AGAIN = 1000  # events, until it is tried whether there is room now
_HEADER = 64
_HEAD = Struct("<qdq")  # of an event


class Journal:
    """Of one node."""

    def __init__(self, memory: mmap | bytearray) -> None:
        """Zeros at first, of `size()` bytes."""
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("q")
        self._half = (len(memory) - _HEADER) // 16 * 8
        self._done = self._words[1]  # the newest event's number << 24 | steps of its effects
        self._number = self._done >> 24
        self._at = 0  # where the next event goes
        self._events_from = 0
        self.before_cut: Callable[[], None] = lambda: None
        self.keeps: Callable[[], object] = lambda: None  # what the host has beside the machine
        self.kept: object = None  # by who has died, at the last cut
        self.carried_out: list[tuple[Effect, float]] = []  # since then, and when

    @staticmethod
    def size(state: int = STATE_BYTES) -> int:
        return _HEADER + 2 * (state + 2 * EVENTS_BYTES)

    @property
    def begun(self) -> bool:
        """Somebody has kept one here."""
        return self._words[0] != 0 or self._words[_HEADER // 8] != 0

    @property
    def full(self) -> bool:
        if self._words[4]:
            return not self._number % AGAIN
        return self._at - self._events_from > EVENTS_BYTES or not self._at

    def add(self, event: Event, now: float) -> None:
        self._number += 1
        self._done = self._number << 24
        if self._words[4]:
            return
        kind, data = pack(event)
        self._at = self._put(self._at, _HEAD.pack(self._number, now, kind) + data)

    def did(self, steps: int = 1) -> None:
        """So many more steps of the newest event's effects are carried out."""
        self._done += steps
        self._words[1] = self._done

    @property
    def recorded(self) -> int:
        """Updates and answers since the state that are in the schedule."""
        return self._words[2 + self._words[0]]

    def record(self, number: int) -> None:
        """So many more are."""
        self._words[2 + self._words[0]] += number

    def cut(self, linked: Journaled) -> None:
        self.before_cut()
        half = 1 - self._words[0]
        start = _HEADER + half * self._half
        stop = self._put(start, pickle.dumps((linked, self.keeps()), pickle.HIGHEST_PROTOCOL))
        if stop == start:
            return
        self._at = self._events_from = stop
        self._words[2 + half] = 0
        self._words[0] = half
        self._words[4] = 0

    def succeed(self, updates: int = 0, copied: int | None = None) -> Journaled:
        """The state of who has died, behind the last event.

        `updates` are in its numbers, or were: `copied` are in their copy, if they are torn. Raises `ProcessLost` where
        the journal is damaged, or had no room.
        """
        if self._words[4]:
            raise ProcessLost(
                "a killed process had more to keep than there was room for, so that nobody can succeed it"
            )
        linked: Journaled
        try:
            state, *entries = self._entries(_HEADER + self._words[0] * self._half)
            linked, self.kept = pickle.loads(state)
            events = list(map(self._event, entries))
        except Exception as error:
            raise ProcessLost(f"a killed process has left a damaged journal: {error}") from error
        word = self._words[1]
        done = word & 0xFFFFFF if word >> 24 == self._number else 0
        self._at, self._done = 0, (self._number << 24) + done
        self.carried_out = linked.take_again(events, done, updates, self, copied)
        return linked

    def _event(self, data: memoryview) -> tuple[Event, float]:
        self._number, now, kind = _HEAD.unpack(data[: _HEAD.size])
        return unpack(kind, data[_HEAD.size :]), now

    def _put(self, at: int, data: bytes) -> int:
        """Returns where the next one goes."""
        stop = at + 8 + -(-len(data) // 8) * 8
        if stop + 8 > _HEADER + self._half * (1 + (at - _HEADER) // self._half):
            self._words[4] = 1
            return at
        self._words[stop // 8] = 0
        self._bytes[at + 8 : at + 8 + len(data)] = data
        self._words[at // 8] = len(data)
        return stop

    def _entries(self, at: int) -> Iterator[memoryview]:
        while size := self._words[at // 8]:
            yield self._bytes[at + 8 : at + 8 + size]
            at += 8 + -(-size // 8) * 8
