"""A small world under a virtual clock: the same machines as in a real run, on a modelled network.

Everything happens in one thread in the order of (time, arrival), so that a seed gives one trace. With real hosts and
no latency this is the inline driver; with fake hosts and faults it is the test bench of the protocol.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from squall.protocol.core import (
    COORDINATOR,
    Effect,
    End,
    Event,
    Forget,
    FrameArrived,
    MemberLost,
    Node,
    Started,
    StartMember,
    TimePassed,
    Transmit,
)
from squall.protocol.link import Linked
from squall.runtime.driver import Host


@dataclass(frozen=True)
class Network:
    """What happens to a frame between two nodes. Times in seconds; chances from 0 to 1."""

    latency_s: float = 0.0
    jitter_s: float = 0.0  # uniform on top of the latency, so frames overtake each other
    loss: float = 0.0
    duplication: float = 0.0


@dataclass
class _Place:
    """A node in the world."""

    linked: Linked
    host: Host
    busy_until: float = 0.0
    wakes: set[float] = field(default_factory=set)  # times for which a `TimePassed` is in the queue
    end: End | None = None

    @property
    def over(self) -> bool:
        """The process is gone: its machine has ended and its peers know all that it had to say."""
        return self.end is not None and not self.linked.unacknowledged


class World:
    """Nodes, a queue of events, and a clock that jumps from one to the next."""

    def __init__(
        self, *, network: Network | None = None, seed: int = 0,
        duration: Callable[[Node, Effect], float] = lambda node, effect: 0.0,
        spawn: Callable[[Node], tuple[Linked, Host]] | None = None, notice_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.now = 0.0
        self.places: dict[Node, _Place] = {}
        self.trace: Callable[[float, Node, Event | Effect], None] | None = None
        self._network = network or Network()
        self._chance = random.Random(seed)
        self._duration = duration  # seconds of the node's time that an effect takes
        self._spawn = spawn  # makes the machine and host of a replacement
        self._notice_s = notice_s  # until the coordinator hears that a process died
        self._queue: list[tuple[float, int, Node, Event]] = []
        self._count = 0

    def add(self, node: Node, linked: Linked, host: Host) -> None:
        self.places[node] = _Place(linked, host)
        self.post(node, Started())

    def post(self, node: Node, event: Event, after_s: float = 0.0) -> None:
        self._put(self.now + after_s, node, event)

    def _put(self, at: float, node: Node, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._queue, (at, self._count, node, event))

    def kill(self, node: Node, why: str = "killed") -> None:
        """The process is gone between two events; the coordinator is told a little later."""
        place = self.places.pop(node, None)
        if place is not None and not place.over and node != COORDINATOR:
            self.post(COORDINATOR, MemberLost(node, why), self._notice_s)

    def run(self, until: Callable[[], bool] | None = None, at_most: int | None = None) -> None:
        """Go on until the coordinator has ended, `until` holds, or `at_most` events are over."""
        handled = 0
        while self._queue and not self.ended and not (until is not None and until()):
            if at_most is not None and handled >= at_most:
                return
            self.step()
            handled += 1

    @property
    def ended(self) -> bool:
        coordinator = self.places.get(COORDINATOR)
        return coordinator is not None and coordinator.end is not None

    def step(self) -> None:
        """Take the next event."""
        at, _, node, event = heapq.heappop(self._queue)
        self.now = max(self.now, at)
        place = self.places.get(node)
        if place is None or place.over:
            return
        if type(event) is TimePassed:
            place.wakes.discard(at)
            due = place.linked.wake_at
            if due is None or due > self.now or self.now < place.busy_until:
                self._wake(node, place)
                return
        if self.now < place.busy_until:
            self.post(node, event, place.busy_until - self.now)
            return
        self._handle(node, place, event)
        outside = place.host.poll() if place.end is None else None
        if outside is not None:
            self.post(node, outside)
        self._wake(node, place)

    def _handle(self, node: Node, place: _Place, event: Event) -> None:
        if self.trace is not None:
            self.trace(self.now, node, event)
        for effect in place.linked.on(event, self.now):
            if self.trace is not None:
                self.trace(self.now, node, effect)
            match effect:
                case Transmit():
                    if effect.payload is not None and not effect.again:
                        place.host.attach(effect.payload)
                    self._carry(node, effect)
                case End():
                    place.host.perform(effect, self.now)
                    place.end = effect
                case StartMember(newcomer) if self._spawn is not None:
                    self.add(newcomer, *self._spawn(newcomer))
                case Forget():
                    pass
                case _:
                    self._perform(node, place, effect)

    def _perform(self, node: Node, place: _Place, effect: Effect) -> None:
        answer = place.host.perform(effect, self.now)
        duration = self._duration(node, effect)
        place.busy_until = max(place.busy_until, self.now) + duration
        if answer is not None:
            self.post(node, answer, place.busy_until - self.now)

    def _carry(self, sender: Node, effect: Transmit) -> None:
        network, chance = self._network, self._chance
        arrived = FrameArrived(sender, effect.frame)
        for copy in range(2):
            if copy and not (network.duplication and chance.random() < network.duplication):
                return
            if network.loss and chance.random() < network.loss:
                continue
            jitter = chance.random() * network.jitter_s if network.jitter_s else 0.0
            self.post(effect.to, arrived, network.latency_s + jitter)

    def _wake(self, node: Node, place: _Place) -> None:
        due = place.linked.wake_at
        if due is None:
            return
        due = max(due, self.now, place.busy_until)
        if due not in place.wakes:
            place.wakes.add(due)
            self._put(due, node, TimePassed())
