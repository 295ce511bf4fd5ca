"""One way of a machine's interface, which the transfers on it share as connections of TCP do: each has an equal part.

Those from one machine to another one are in a lane (`transports.lanes`) where that is slow: one goes after the other.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from squall.runtime.wire import Passage


class Together(Passage):
    """What has arrived when the last of its parts has."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[float | Passage]) -> None:
        self._parts = parts

    def arrives(self, now: float) -> float:
        return max(part.arrives(now) if isinstance(part, Passage) else part for part in self._parts)


class Share:
    """A transfer's part of a way. It is over when each of those under way has been given `mark` bytes."""

    __slots__ = ("mark", "over_at")

    def __init__(self, mark: float) -> None:
        self.mark = mark
        self.over_at = math.inf  # until it is


class Way:
    """Its level: the bytes that a transfer would have been given that had been under way since the start."""

    __slots__ = ("_at", "_level", "_shares", "bandwidth")

    def __init__(self, bandwidth: float) -> None:
        """`bandwidth`: bytes a second."""
        self.bandwidth = bandwidth
        self._at = 0.0  # the time at which it has this level
        self._level = 0.0
        self._shares: list[Share] = []  # under way, by their marks

    def begin(self, now: float, size: float) -> Share:
        """A transfer of so many bytes begins. For an earlier time nothing may be begun or asked any more."""
        self._advance(now)
        share = Share(self._level + size)
        insort(self._shares, share, key=attrgetter("mark"))
        return share

    def ends(self, now: float, share: Share) -> float:
        """When a transfer was over; or will be, as foreseen at this time if no other begins."""
        self._advance(now)
        if share.over_at < math.inf:
            return share.over_at
        return next(at for each, at in self._foreseen() if each is share)

    def _foreseen(self) -> Iterator[tuple[Share, float]]:
        """The transfers in the order of their ends, with the times of these."""
        at, level, shares = self._at, self._level, self._shares
        for over, share in enumerate(shares):
            at += (share.mark - level) * (len(shares) - over) / self.bandwidth
            level = share.mark
            yield share, at

    def _advance(self, now: float) -> None:
        over = 0
        for share, at in self._foreseen():
            if at > now:
                break
            share.over_at = self._at = at
            self._level = share.mark
            over += 1
        del self._shares[:over]
        if self._shares:
            self._level += (now - self._at) * self.bandwidth / len(self._shares)
        self._at = now


class Lane:
    """From one machine to another: one transfer after the other, in the order in which they come to it."""

    __slots__ = ("_joined_s", "_queue")

    def __init__(self) -> None:
        self._queue: deque[Transfer] = deque()
        self._joined_s = 0.0  # that all take at least, one after the other

    def join(self, transfer: Transfer) -> None:
        self._queue.append(transfer)
        transfer.joined_s, self._joined_s = self._joined_s, self._joined_s + transfer.least_s

    def turn(self, now: float, transfer: Transfer) -> float:
        """When it may be its turn, of which it asks again then."""
        while (first := self._queue[0]) is not transfer:
            if (over := first.sent(now)) > now:
                return max(over, over + transfer.joined_s - first.joined_s - first.least_s)
            self._queue.popleft()
        return now


class Transfer(Passage):
    """Numbers on their way from one machine to another, through the interfaces of both at once.

    Messages of one process to another keep their order: `behind` is what must arrive before. Without ways it is a mere
    message. `begun` is called when it begins, which may be later than it is sent: who sends is busy until then, and it
    waits for its turn in a lane. Only then it takes its part of the ways, whose state at a later time nobody knows.
    """

    __slots__ = (
        "_begins", "_begun", "_behind", "_lane", "_latency_s", "_shares", "_size", "_ways", "arrived", "joined_s",
        "least_s",
    )  # fmt: skip

    def __init__(
        self, begins: float, size: float, ways: Sequence[Way], latency_s: float, behind: Transfer | None,
        begun: Callable[[float], None] | None = None, lane: Lane | None = None,
    ) -> None:  # fmt: skip
        self.arrived = False
        self._lane = lane
        self.joined_s = -1.0  # what all take that were in the lane before; negative: it has not come to it
        self.least_s = max((size / way.bandwidth for way in ways), default=0.0)
        self._begins = begins
        self._size = size
        self._ways = ways
        self._shares: list[Share] | None = None  # of each way, when it has begun
        self._latency_s = latency_s
        self._behind = behind
        self._begun = begun

    def arrives(self, now: float) -> float:
        at = self._foreseen(now)
        self.arrived = at <= now
        return at

    def _foreseen(self, now: float) -> float:
        if now < self._begins:
            return self._begins
        sent, behind = self.sent(now), self._behind
        if self._shares is None:
            return sent
        at = sent + self._latency_s
        if behind is not None and not behind.arrived:
            return max(at, math.nextafter(behind._foreseen(now), math.inf))
        self._behind = None
        return at

    def sent(self, now: float) -> float:
        """When all of it has passed the ways; where it waits for its turn, when that may come."""
        if self._shares is None:
            if self._lane is not None:
                if self.joined_s < 0:
                    self._lane.join(self)
                if (turn := self._lane.turn(now, self)) > now:
                    return turn
            self._shares = [way.begin(now, self._size) for way in self._ways]
            if self._begun is not None:
                self._begun(now)
        return max([self._begins, *(way.ends(now, share) for way, share in zip(self._ways, self._shares))])
