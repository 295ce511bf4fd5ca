"""One way of a machine's interface, which the transfers on it share as connections of TCP do: each has an equal part.

Who waits behind others would wait too long for the first, and not long enough for the last: two machines whose
exchanges do not fall together use one way of their link at a time, and keep to that.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from squall.runtime.wire import Passage

HAIR_BYTES = 1.0  # what is left of a transfer that is over, by rounding


class Way:
    """A transfer is over when the level has reached its mark: the bytes that each of those under way has been given."""

    __slots__ = ("_at", "_bandwidth", "_level", "_marks")

    def __init__(self, bandwidth: float) -> None:
        """`bandwidth`: bytes a second."""
        self._bandwidth = bandwidth
        self._at = 0.0  # the time at which it has this level
        self._level = 0.0
        self._marks: list[float] = []  # of the transfers under way, sorted

    def begin(self, now: float, size: float) -> float:
        """A transfer of so many bytes begins; returns its mark."""
        self._advance(now)
        mark = self._level + size
        insort(self._marks, mark)
        return mark

    def ends(self, now: float, mark: float) -> float:
        """When a transfer is over, as foreseen if no other begins; `now` if it is."""
        self._advance(now)
        left = mark - self._level
        if left < HAIR_BYTES:
            return now
        before = bisect_left(self._marks, mark)
        shorter = sum(self._marks[:before]) - before * self._level
        return self._at + (shorter + (len(self._marks) - before) * left) / self._bandwidth

    def _advance(self, now: float) -> None:
        marks, over = self._marks, 0
        while over < len(marks) and self._at < now:
            sharing = len(marks) - over
            until = self._at + (marks[over] - self._level) * sharing / self._bandwidth
            if until > now:
                self._level += (now - self._at) * self._bandwidth / sharing
                self._at = now
            else:
                self._level, self._at = marks[over], until
                over += 1
        del marks[:over]
        self._at = max(self._at, now)


class Transfer(Passage):
    """Numbers on their way from one machine to another, through the interfaces of both at once.

    Messages of one process to another keep their order: `behind` is what must arrive before.
    """

    __slots__ = ("_behind", "_latency_s", "_least", "_marks", "arrived")

    def __init__(self, begins: float, size: float, ways: tuple[Way, ...], latency_s: float, behind: Transfer | None,
                 least_s: float = 0.0) -> None:  # fmt: skip
        """`least_s`: so long it takes on the link, if it has all of it. Without ways it is a mere message."""
        self.arrived = False
        self._marks = [(way, way.begin(begins, size)) for way in ways]
        self._least = begins + least_s
        self._latency_s = latency_s
        self._behind = behind if behind is not None and not behind.arrived else None

    def arrives(self, now: float) -> float:
        at = self._foreseen(now)
        self.arrived = at <= now
        return at

    def _foreseen(self, now: float) -> float:
        if self.arrived:
            return now
        sent = now - self._latency_s
        at = max(self._least, sent, *(way.ends(sent, mark) for way, mark in self._marks))
        at = now if at <= sent else at + self._latency_s
        if self._behind is not None and not self._behind.arrived:
            return max(at, math.nextafter(self._behind._foreseen(now), math.inf))
        return at
