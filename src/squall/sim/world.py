"""A small world under a virtual clock: the same machines as in a real run, on a modelled network.

Everything happens in one thread in the order of (time, arrival), so that a seed gives one trace. With real hosts and
no latency this is the inline driver; with fake hosts and faults it is the test bench of the protocol.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import repeat
from typing import NamedTuple, Protocol

from squall.protocol.core import (
    COORDINATOR,
    Effect,
    End,
    Event,
    Forget,
    FrameArrived,
    MemberLost,
    MessageArrived,
    Node,
    Send,
    Started,
    StartMember,
    TimePassed,
    Transmit,
)
from squall.protocol.link import Linked
from squall.runtime.driver import Host
from squall.sim.direct import Direct


class Wire(Protocol):
    """What happens to frames between nodes."""

    def arrivals(self, sender: Node, effect: Send | Transmit, now: float, chance: random.Random) -> Sequence[float]:
        """When copies of the frame arrive, at `now` or later; none: it is lost."""


@dataclass(frozen=True)
class Network:
    """The same wire between any two nodes. Times in seconds; chances from 0 to 1."""

    latency_s: float = 0.0
    jitter_s: float = 0.0  # uniform on top of the latency, so frames overtake each other
    loss: float = 0.0
    duplication: float = 0.0

    def arrivals(self, sender: Node, effect: Send | Transmit, now: float, chance: random.Random) -> Sequence[float]:
        at = now + self.latency_s
        if not (self.jitter_s or self.loss or self.duplication):
            return (at,)
        copies = 1 + (chance.random() < self.duplication)
        return [at + chance.random() * self.jitter_s for _ in range(copies) if chance.random() >= self.loss]


class Clock(NamedTuple):
    """A node's own clock: offset + rate x the world's time."""

    rate: float = 1.0
    offset_s: float = 0.0

    def reads(self, now: float) -> float:
        return now * self.rate + self.offset_s

    def when(self, reading: float) -> float:
        """The first moment of the world's time at which it reads this, or a hair more."""
        at = (reading - self.offset_s) / self.rate
        while self.reads(at) < reading:
            at = math.nextafter(at, math.inf)
        return at


class _Place:
    """A node in the world."""

    __slots__ = ("busy_until", "called", "clock", "end", "host", "inbox", "linked", "poll", "woken_at")

    def __init__(self, node: Node, linked: Linked | Direct, host: Host, clock: Clock | None) -> None:
        self.linked = linked
        self.host = host
        self.clock = clock  # None: the world's own
        self.busy_until = 0.0
        self.poll = host.poll if node == COORDINATOR else None  # others hear nothing from outside
        self.inbox: deque[Event] | None = None  # what came while it was busy
        self.called = False  # a `_Free` is in the queue: as long as something is in the inbox
        self.woken_at = math.inf  # the earliest `TimePassed` in the queue
        self.end: End | None = None

    @property
    def over(self) -> bool:
        """The process is gone: its machine has ended and its peers know all that it had to say."""
        return self.end is not None and not self.linked.unacknowledged


class _Free(Event, frozen=True, gc=False):
    """A node that was busy can look into its inbox."""


_FREE = _Free()
_TIME_PASSED = TimePassed()
_ARRIVALS = (FrameArrived, MessageArrived)
_CALLS = (TimePassed, _Free)
_WORLDLY = (End, StartMember, Forget)


class World:
    """Nodes, a queue of events, and a clock that jumps from one to the next.

    A node carries out its effects one after the other, as a process does: a message that it gives after a computation
    leaves when that is over.
    """

    def __init__(
        self, *, network: Wire | None = None, seed: int = 0,
        duration: Callable[[Node, Effect, float], float] = lambda node, effect, now: 0.0,
        spawn: Callable[[Node], tuple[Linked | Direct, Host]] | None = None, notice_s: float = 0.0,
        spawn_s: Callable[[Node], float] = lambda node: 0.0, clock: Callable[[Node], Clock | None] = lambda node: None,
        now: float = 0.0,
    ) -> None:  # fmt: skip
        self.now = now
        self.ended = False  # the coordinator has, or somebody who watches wants no more
        self.places: dict[Node, _Place] = {}
        self.trace: Callable[[float, Node, Event | Effect], None] | None = None
        self._arrivals = (network or Network()).arrivals
        self._chance = random.Random(seed)
        self._duration = duration  # seconds that an effect takes which a node begins at a time
        self._spawn = spawn  # makes the machine and host of a replacement
        self._spawn_s = spawn_s  # until a replacement is there
        self._notice_s = notice_s  # until the coordinator hears that a process died
        self._clock = clock
        self._queue: list[tuple[float, int, Node, Event]] = []
        self._actions: dict[Node, Callable[[], None]] = {}  # by the made-up node whose turn it will be
        self._count = 0

    def add(self, node: Node, linked: Linked | Direct, host: Host) -> None:
        self.places[node] = _Place(node, linked, host, self._clock(node))
        self.post(node, Started())

    def bring(self, node: Node) -> None:
        """Add a node that the world spawns itself, as soon as it can be there."""
        assert self._spawn is not None
        after_s = self._spawn_s(node)
        if after_s > 0:  # by then its machine may be gone again, so it asks once more
            self.at(self.now + after_s, lambda: self.bring(node))
        else:
            self.add(node, *self._spawn(node))

    def post(self, node: Node, event: Event, after_s: float = 0.0) -> None:
        self._put(self.now + after_s, node, event)

    def _put(self, at: float, node: Node, event: Event, first: bool = False) -> None:
        self._count += 1
        heappush(self._queue, (at, -self._count if first else self._count, node, event))

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do something to the world at a time of its clock."""
        self._count += 1
        turn = Node("world", self._count)
        self._actions[turn] = action
        self._put(time_s, turn, _TIME_PASSED)

    def kill(self, node: Node, why: str = "killed") -> None:
        """The process is gone between two events; the coordinator is told a little later."""
        place = self.places.pop(node, None)
        if place is not None and not place.over and node != COORDINATOR:
            self.post(COORDINATOR, MemberLost(node, why), self._notice_s)

    def pause(self, node: Node, seconds: float) -> None:
        """The process does nothing for so long, as if its machine slept; what comes meanwhile waits."""
        place = self.places.get(node)
        if place is not None:
            place.busy_until = max(place.busy_until, self.now) + seconds

    def prolong(self, node: Node, until: float) -> None:
        """What the node is doing takes longer than it was thought."""
        place = self.places.get(node)
        if place is not None and until > place.busy_until:
            place.busy_until = until

    def run(self, until: Callable[[], bool] | None = None, at_most: int | None = None) -> None:
        """Go on until the coordinator has ended, `until` holds, or `at_most` events are over."""
        for _ in repeat(None) if at_most is None else repeat(None, at_most):
            if not self._queue or self.ended or (until is not None and until()):
                return
            self.step()

    @property
    def lively(self) -> bool:
        """Something will happen yet."""
        return bool(self._queue) and not self.ended

    def step(self) -> None:
        """Take the next event. Written in one piece: planning a cluster takes millions of these."""
        at, _, node, event = heappop(self._queue)
        if at > self.now:
            self.now = at
        now = self.now
        place = self.places.get(node)
        if place is None:
            if node in self._actions:
                self._actions.pop(node)()
            return
        if place.end is not None and place.over:
            return
        if now < place.busy_until or place.called or type(event) in _CALLS:
            turn = self._turn(at, node, place, event)
            if turn is None:
                return
            event = turn
        trace = self.trace
        if trace is not None:
            trace(now, node, event)
        for effect in place.linked.on(event, now if place.clock is None else place.clock.reads(now)):
            if trace is not None:
                trace(now, node, effect)
            if type(effect) is Send or type(effect) is Transmit:  # most are
                self._carry(node, place, effect)
            else:
                self._perform(node, place, effect)
        if place.poll is not None and place.end is None:
            outside = place.poll()
            if outside is not None:
                self.post(node, outside)
        if place.inbox and not place.called:
            self._call(node, place)
        if place.linked.wake_at is not None:
            self._wake(node, place)

    def _turn(self, at: float, node: Node, place: _Place, event: Event) -> Event | None:
        """What a node handles now that is or was busy, or was to be woken; None: nothing yet."""
        busy = self.now < place.busy_until
        match event:
            case TimePassed():
                if at != place.woken_at:  # an earlier one has taken its place
                    return None
                place.woken_at = math.inf
                due = place.linked.wake_at
                if due is None or due > self._reads(place) or busy:
                    self._wake(node, place)
                    return None
                return event
            case _Free():
                if busy:  # what has waited once goes before an answer that comes then
                    self._put(place.busy_until, node, _FREE, first=True)
                    return None
                place.called = False
                assert place.inbox is not None
                return place.inbox.popleft()
        if type(event) not in _ARRIVALS:  # the answer to what kept it busy
            if busy:
                self._put(place.busy_until, node, event)
                return None
            return event
        if place.inbox is None:
            place.inbox = deque()
        place.inbox.append(event)
        if not place.called:
            self._call(node, place)
        return None

    def _call(self, node: Node, place: _Place) -> None:
        place.called = True
        self._put(max(self.now, place.busy_until), node, _FREE)

    def _reads(self, place: _Place) -> float:
        return self.now if place.clock is None else place.clock.reads(self.now)

    def _carry(self, node: Node, place: _Place, effect: Send | Transmit) -> None:
        arrived: Event
        if type(effect) is Send:
            arrived, again = MessageArrived(node, effect.message), False
        else:
            assert isinstance(effect, Transmit)
            arrived, again = FrameArrived(node, effect.frame), effect.again
        if effect.payload is not None and not again:
            place.host.attach(effect.payload)
            if effect.payload.kind != "gradient":  # which lies where it is read
                self._occupy(node, place, effect)
        leaves = place.busy_until if place.busy_until > self.now else self.now
        for at in self._arrivals(node, effect, leaves, self._chance):
            self._count += 1
            heappush(self._queue, (at, self._count, effect.to, arrived))

    def _perform(self, node: Node, place: _Place, effect: Effect) -> None:
        if type(effect) in _WORLDLY:
            self._change(node, place, effect)
            return
        self._occupy(node, place, effect)  # first: a host may want to know how long it takes
        answer = place.host.perform(effect, self.now)
        if answer is not None:
            self._put(place.busy_until, node, answer)

    def _change(self, node: Node, place: _Place, effect: Effect) -> None:
        """An effect on who there is."""
        match effect:
            case End():
                place.host.perform(effect, self.now)
                place.end = effect
                self.ended |= node == COORDINATOR
            case StartMember(newcomer) if self._spawn is not None:
                self.bring(newcomer)
            case StartMember():
                place.host.perform(effect, self.now)
            case Forget(gone) if isinstance(place.linked, Direct):  # links have done so themselves
                place.linked.forget(gone)

    def _occupy(self, node: Node, place: _Place, effect: Effect) -> None:
        begins = place.busy_until if place.busy_until > self.now else self.now
        place.busy_until = begins + self._duration(node, effect, begins)

    def _wake(self, node: Node, place: _Place) -> None:
        due = place.linked.wake_at
        if due is None:
            return
        if place.clock is not None:
            due = place.clock.when(due)
        due = max(due, self.now, place.busy_until)
        if due < place.woken_at:
            place.woken_at = due
            self._put(due, node, _TIME_PASSED)
