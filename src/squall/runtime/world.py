"""A small world under a virtual clock: the same machines as in a real run, on a modelled network.

Everything happens in one thread in the order of (time, arrival), so that a seed gives one trace. With real hosts and
no latency this is the inline driver; with fake hosts and faults it is the test bench of the protocol.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from heapq import heappop, heappush, heapreplace
from itertools import repeat
from typing import Any

from squall.protocol.effects import Effect, End, Forget, Send, StartMember, Transmit
from squall.protocol.events import Event, FrameArrived, MemberLost, MessageArrived, Started, TimePassed
from squall.protocol.frames import Frame, Message
from squall.protocol.link import Linked
from squall.protocol.machine import Machine
from squall.protocol.nodes import COORDINATOR, Node
from squall.runtime.driver import Host
from squall.runtime.wire import Network, Wire
from squall.runtime.world_nodes import Absence, Clock, Entry, Line, Parcel, ParcelArrived, WorldNode
from squall.usercode.blame import note

Price = Callable[[Node, Any, float], float]  # seconds that an effect takes which a node begins at a time


class _Free(Event, frozen=True, gc=False):
    """A node that was busy can look into its inbox."""


_FREE = _Free()
_STARTED = Started()
_TIME_PASSED = TimePassed()
_ARRIVALS = (FrameArrived, ParcelArrived, MessageArrived)
_CALLS = (TimePassed, _Free)
_WORLDLY = (End, StartMember, Forget)


class World:
    """Nodes, a queue of events, and a clock that jumps from one to the next.

    A node carries out its effects one after the other, as a process does: a message that it gives after a computation
    leaves when that is over.

    A machine that comes without links sends and hears messages as they are. That is for a wire that loses, repeats and
    reorders nothing, where links would have nothing to do: it costs half as much.
    """

    def __init__(
        self, *, network: Wire | None = None, seed: int = 0,
        prices: Mapping[type[Effect], Price] | None = None,
        spawn: Callable[[Node], tuple[Linked | Machine, Host]] | None = None, notice_s: float = 0.0,
        spawn_s: Callable[[Node], float] = lambda node: 0.0, clock: Callable[[Node], Clock | None] = lambda node: None,
        now: float = 0.0,
    ) -> None:  # fmt: skip
        self.now = now
        self.ended = False  # the coordinator has, or somebody who watches wants no more
        self.places: dict[Node, WorldNode] = {}
        self.trace: Callable[[float, Node, Event | Effect], None] | None = None
        self._arrivals = (network or Network()).arrivals
        self._chance = random.Random(seed)
        self._prices = prices if prices is not None else {}  # a message has one only if weights travel along
        assert not self._prices.keys() & set(_WORLDLY)
        self._spawn = spawn  # makes the machine and host of a replacement
        self._spawn_s = spawn_s  # until a replacement is there
        self._notice_s = notice_s  # until the coordinator hears that a process died
        self._clock = clock
        self._queue: list[Entry] = []
        self._fronts: list[tuple[*Entry, Line]] = []  # the first of each line; no queue for ten thousand nodes
        self._actions: dict[Node, Callable[[], None]] = {}  # by the made-up node whose turn it will be
        self._count = 0

    def add(self, node: Node, linked: Linked | Machine, host: Host) -> None:
        self.places[node] = WorldNode(node, linked, host, self._clock(node))
        self.post(node, _STARTED)

    def bring(self, node: Node) -> None:
        """Add a node that the world spawns itself, as soon as it can be there."""
        assert self._spawn is not None
        after_s = self._spawn_s(node)
        if after_s > 0:  # by then its machine may be gone again, so it asks once more
            self.at(self.now + after_s, lambda: self.bring(node))
        else:
            self.add(node, *self._spawn(node))

    def post(self, node: Node, event: Event, after_s: float = 0.0) -> None:
        self._put(self.now + after_s, self.places.get(node) or Absence(node), event)

    def _put(self, at: float, place: WorldNode | Absence, event: Event, first: bool = False) -> None:
        self._count += 1
        heappush(self._queue, (at, -self._count if first else self._count, place, None, event))

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do something to the world at a time of its clock."""
        self._count += 1
        turn = Node("world", self._count)
        self._actions[turn] = action
        self._put(time_s, Absence(turn), _TIME_PASSED)

    def kill(self, node: Node, why: str = "killed") -> None:
        """The process is gone between two events; the coordinator is told a little later."""
        place = self.places.pop(node, None)
        if place is not None:
            place.there = False
            if not place.over and node != COORDINATOR:
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
            if self.ended or not (self._queue or self._fronts) or (until is not None and until()):
                return
            self.step()

    def close(self) -> None:
        """The world stands still: end what has not ended. Hosts hold files, and processes that load data."""
        with ExitStack() as stack:  # one that fails does not keep the others from it
            for node, place in self.places.items():
                if node != COORDINATOR and place.end is None:
                    stack.callback(place.host.perform, End("finished"), self.now)

    @property
    def lively(self) -> bool:
        """Something will happen yet."""
        return not self.ended and bool(self._queue or self._fronts)

    def step(self) -> None:
        """Take the next event. Written in one piece: planning a cluster takes millions of these."""
        fronts, queue = self._fronts, self._queue
        if not fronts or (queue and queue[0] < fronts[0]):
            at, _, to, sender, what = heappop(queue)
        else:
            at, _, to, sender, what, line = fronts[0]
            line.popleft()
            if line:
                heapreplace(fronts, line[0])
            else:
                heappop(fronts)
        if at > self.now:
            self.now = at
        now = self.now
        event: Event = what
        if sender is not None:
            if type(what) is Frame:
                event = FrameArrived(sender, what)
            elif type(what) is Parcel:
                event = ParcelArrived(sender, what.frame, what.payload, what.numbers)
            else:
                event = MessageArrived(sender, what)
        if type(to) is WorldNode and to.there:
            place = to
        elif to.node in self.places:  # it has come since
            place = self.places[to.node]
        else:
            if to.node in self._actions:
                self._actions.pop(to.node)()
            return
        if place.end is not None and place.over:
            return
        if now < place.busy_until or place.called or (sender is None and type(event) in _CALLS):
            turn = self._turn(at, place, event)
            if turn is None:
                return
            event = turn
        if type(event) is ParcelArrived:
            place.host.incoming(event.payload, event.numbers)
            event = FrameArrived(event.sender, event.frame)
        trace = self.trace
        if trace is not None:
            trace(now, place.node, event)
        if place.forgotten is None or type(event) is not MessageArrived or event.sender not in place.forgotten:
            for effect in place.linked.on(event, now if place.clock is None else place.clock.reads(now)):
                if trace is not None:
                    trace(now, place.node, effect)
                if type(effect) is Send or type(effect) is Transmit:  # most are
                    self._carry(place, effect)
                else:
                    self._perform(place, effect)
        if place.poll is not None and place.end is None:
            outside = place.poll()
            if outside is not None:
                self._put(now, place, outside)
        if place.inbox is not None and not place.called:
            self._call(place)
        due = place.linked.wake_at
        if due is not None:
            self._wake(place, due)

    def _turn(self, at: float, place: WorldNode, event: Event) -> Event | None:
        """What a node handles now that is or was busy, or was to be woken; None: nothing yet."""
        busy = self.now < place.busy_until
        match event:
            case TimePassed():
                if at != place.woken_at:  # an earlier one has taken its place
                    return None
                place.woken_at = math.inf
                due = place.linked.wake_at
                if due is not None and (due > self._reads(place) or busy):
                    self._wake(place, due)
                    return None
                return event if due is not None else None
            case _Free():
                if busy:  # what has waited once goes before an answer that comes then
                    self._put(place.busy_until, place, _FREE, first=True)
                    return None
                place.called = False
                assert place.inbox is not None
                waited = place.inbox.popleft()
                if not place.inbox:  # an empty one is half a kilobyte
                    place.inbox = None
                return waited
        if type(event) not in _ARRIVALS:  # the answer to what kept it busy
            if busy:
                self._put(place.busy_until, place, event)
                return None
            return event
        if place.inbox is None:
            place.inbox = deque()
        place.inbox.append(event)
        if not place.called:
            self._call(place)
        return None

    def _call(self, place: WorldNode) -> None:
        place.called = True
        self._put(max(self.now, place.busy_until), place, _FREE)

    def _reads(self, place: WorldNode) -> float:
        return self.now if place.clock is None else place.clock.reads(self.now)

    def _carry(self, place: WorldNode, effect: Send | Transmit) -> None:
        sent: Message | Frame | Parcel
        if type(effect) is Send:
            sent, again = effect.message, False
        else:
            assert isinstance(effect, Transmit)
            sent, again = effect.frame, effect.again
        leaves = place.busy_until if place.busy_until > self.now else self.now
        payload = effect.payload
        if payload is not None and not again:
            if place.attach is not None:
                place.attach(payload)
            if payload.kind != "gradient":  # which lies where it is read
                price = self._prices.get(type(effect))
                if price is not None:
                    leaves = place.busy_until = leaves + price(place.node, effect, leaves)
        if payload is not None and place.outgoing is not None:
            numbers = place.outgoing(payload)
            if numbers is not None:
                assert isinstance(sent, Frame)
                sent = Parcel(sent, payload, numbers)
        to = self.places.get(effect.to)
        for at in self._arrivals(place.node, effect, leaves, self._chance):
            self._count += 1
            line = place.going if to is None or to.coming is None else to.coming
            if line is None or (line and at < line[-1][0]):
                heappush(self._queue, (at, self._count, to or Absence(effect.to), place.node, sent))
                continue
            line.append((at, self._count, to or Absence(effect.to), place.node, sent, line))
            if len(line) == 1:
                heappush(self._fronts, line[0])

    def _perform(self, place: WorldNode, effect: Effect) -> None:
        price = self._prices.get(type(effect))
        if price is not None:  # first: a host may want to know it
            begins = place.busy_until if place.busy_until > self.now else self.now
            place.busy_until = begins + price(place.node, effect, begins)
        elif type(effect) in _WORLDLY:
            self._change(place, effect)
            return
        try:
            answer = place.host.perform(effect, self.now)
        except Exception as error:
            note(error, f"in {place.node.role} {place.node.index}", role=place.node.role, index=place.node.index)
            raise
        if answer is not None:
            self._put(max(self.now, place.busy_until), place, answer)

    def _change(self, place: WorldNode, effect: Effect) -> None:
        """An effect on who there is."""
        match effect:
            case End():
                place.host.perform(effect, self.now)
                place.end = effect
                self.ended |= place.node == COORDINATOR
            case StartMember(newcomer) if self._spawn is not None:
                self.bring(newcomer)
            case StartMember():
                place.host.perform(effect, self.now)
            case Forget(gone) if not isinstance(place.linked, Linked):  # links have done so themselves
                if place.forgotten is None:
                    place.forgotten = {}
                place.forgotten[gone] = None

    def _wake(self, place: WorldNode, due: float) -> None:
        if place.clock is not None:
            due = place.clock.when(due)
        due = max(due, self.now, place.busy_until)
        if due < place.woken_at:
            place.woken_at = due
            self._put(due, place, _TIME_PASSED)
