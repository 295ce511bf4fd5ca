"""A small world under a virtual clock: the same machines as in a real run, on a modelled network.

Everything happens in one thread in the order of (time, arrival), so that a seed gives one trace. With real hosts and
no latency this is the inline driver; with fake hosts and faults it is the test bench of the protocol.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from heapq import heappop, heappush, heapreplace
from itertools import repeat
from typing import Any

from squall.protocol.copied import Attach
from squall.protocol.effects import Admit, Effect, End, Forget, KillMember, KillMembers, Send, StartMember, Transmit
from squall.protocol.events import Event, FrameArrived, MessageArrived, ProcessEnded, TimePassed
from squall.protocol.frames import Frame, Message
from squall.protocol.link import Linked
from squall.protocol.machine import Machine
from squall.protocol.nodes import COORDINATOR, NURSERY, Node
from squall.runtime.driver import Host
from squall.runtime.wire import IDEAL, Conditions, Passage
from squall.runtime.world_nodes import Absent, Answer, Entry, Free, Parcel, ParcelArrived, Stream, UnderWay, WorldNode
from squall.usercode.blame import note

_FREE, _TIME_PASSED = Free(), TimePassed()
_WORLD = Absent(Node("world", 0))  # to whom the actions of `at` are put into the queue
_HEARD: dict[type, Callable[[Node, Any], Event]] = {
    Frame: FrameArrived, Parcel: lambda sender, parcel: ParcelArrived(sender, *parcel),
}  # fmt: skip  # what comes, as an event; without links it is a message
_ARRIVALS, _CALLS = (FrameArrived, ParcelArrived, MessageArrived), (TimePassed, Free)
_MEMBERSHIP = (End, StartMember, KillMember, KillMembers, Forget, Admit, Attach)


class World:
    """Nodes, a queue of events, and a clock that jumps from one to the next.

    A node carries out its effects one after the other, as a process does: a message that it gives after a computation
    leaves when that is over.

    A machine that comes without links sends and hears messages as they are. That is for a wire that loses, repeats and
    reorders nothing, where links would have nothing to do: it costs half as much.
    """

    def __init__(
        self, conditions: Conditions = IDEAL, *, seed: int = 0, now: float = 0.0,
        spawn: Callable[[Node], tuple[Linked | Machine, Host] | None] | None = None,
    ) -> None:  # fmt: skip
        self.now, self._count = now, 0
        self.ended = False  # the coordinator has, or somebody who watches wants no more
        self.processes: dict[Node, WorldNode] = {}
        self.on_kill: list[Callable[[Node], None]] = []
        self.trace: Callable[[float, Node, Event | Effect], None] | None = None
        self._conditions = conditions
        self._arrivals, self._prices = conditions.network.arrivals, conditions.prices
        assert not self._prices.keys() & set(_MEMBERSHIP)
        self._chance = random.Random(seed)
        self._spawn = spawn  # makes the machine and host of a replacement
        self._queue: list[Entry] = []
        self._heads: list[tuple[*Entry, Stream]] = []  # the first message of each stream

    def add(self, node: Node, linked: Linked | Machine, host: Host, home: Node = NURSERY) -> None:
        """A process on the machine of the nursery `home`, which is told when it is killed."""
        process = self.processes[node] = WorldNode(node, linked, host, self._conditions.clock(node), home)
        if node == COORDINATOR and home in self.processes:
            self.processes[home].pipe = COORDINATOR
        self._queue_free(process)

    def bring(self, node: Node, home: Node = NURSERY) -> None:
        """Add a node that the world spawns itself, as soon as it can be there."""
        assert self._spawn is not None
        after_s = self._conditions.spawn_s(node)
        if after_s > 0:  # by then its machine may be gone again, so it asks once more
            self.at(self.now + after_s, lambda: self.bring(node, home))
        elif (made := self._spawn(node)) is not None:
            self.add(node, *made, home)

    def post(self, node: Node, event: Event, after_s: float = 0.0) -> None:
        self._put(self.now + after_s, self.processes.get(node) or Absent(node), event)

    def _put(self, at: float, process: WorldNode | Absent, what: Any, first: bool = False) -> None:
        self._count += 1
        heappush(self._queue, (at, -self._count if first else self._count, process, None, what))

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do something to the world at a time of its clock."""
        self._put(time_s, _WORLD, action)

    def kill(self, node: Node, why: str = "killed", notice_s: float | None = None, torn: bool = False) -> bool:
        """The process, if there is one, is gone; its nursery is told a little later, or after `notice_s`."""
        process = self.processes.pop(node, None)
        if process is not None:
            process.alive = False
            for told in self.on_kill:
                told(node)
            if not process.over:
                after_s = self._conditions.notice_s if notice_s is None else notice_s
                self.post(process.home, ProcessEnded(node, why, torn), after_s)
        return process is not None and not process.over

    def pause(self, node: Node, seconds: float) -> None:
        """The process does nothing for so long, as if its machine slept; what comes meanwhile waits."""
        if node in self.processes:
            self.prolong(node, max(self.processes[node].busy_until, self.now) + seconds)

    def prolong(self, node: Node, until: float) -> None:
        """What the node is doing takes longer than its price said."""
        if (process := self.processes.get(node)) is not None:
            process.busy_until = max(process.busy_until, until)

    def run(self, until: Callable[[], bool] | None = None, at_most: int | None = None) -> None:
        """Go on until the coordinator has ended, `until` holds, or `at_most` events are over."""
        for _ in repeat(None) if at_most is None else repeat(None, at_most):
            if not self.lively or (until is not None and until()):
                return
            self.step()

    def close(self) -> None:
        """The world stands still: end what has not ended. Hosts hold files, and processes that load data."""
        with ExitStack() as stack:  # one that fails does not keep the others from it
            for node, process in self.processes.items():
                if node != COORDINATOR and process.end is None:
                    stack.callback(process.host.perform, End("finished"), self.now)

    @property
    def lively(self) -> bool:
        """Something will happen yet."""
        return not self.ended and bool(self._queue or self._heads)

    def step(self) -> None:
        """Take the next event. Written in one piece: planning a cluster takes millions of these."""
        heads, queue = self._heads, self._queue
        if not heads or (queue and queue[0] < heads[0]):
            at, _, to, sender, what = heappop(queue)
        else:
            at, _, to, sender, what, stream = heads[0]
            stream.popleft()
            if stream:
                heapreplace(heads, stream[0])
            else:
                heappop(heads)
        now = self.now = at if at > self.now else self.now
        if sender is not None and type(what) is UnderWay:
            if (at := what.arrives(now)) > now:
                self._count += 1
                heappush(queue, (at, self._count, to, sender, what))
                return
            what = what.sent
        event: Event = what if sender is None else _HEARD.get(type(what), MessageArrived)(sender, what)
        process = to if type(to) is WorldNode and to.alive else None
        if process is None and (sender is not None or type(to) is Absent):
            process = self.processes.get(to.node)  # which has come since; a dead one's host has nothing to say to it
        if process is None or (process.end is not None and process.over):
            if to is _WORLD:
                what()
            return
        if now < process.busy_until or process.free_queued or (sender is None and type(event) in _CALLS):
            turn = self._to_handle(at, process, event)
            if turn is None:
                return
            event = turn
        if type(event) is ParcelArrived:
            if not isinstance(process.linked, Linked) or process.linked.takes(event.sender, event.frame.number):
                process.host.incoming(event.payload, event.numbers)
            event = FrameArrived(event.sender, event.frame)
        elif type(event) is Answer:
            event = event.make()
        trace = self.trace
        if trace is not None:
            trace(now, process.node, event)
        if process.forgotten is None or type(event) is not MessageArrived or event.sender not in process.forgotten:
            for effect in process.linked.on(event, now if process.clock is None else process.clock.reads(now)):
                if trace is not None:
                    trace(now, process.node, effect)
                if type(effect) is Send or type(effect) is Transmit:  # most are
                    self._carry(process, effect)
                else:
                    self._perform(process, effect)
        if process.poll is not None and process.end is None and (outside := process.poll()) is not None:
            self._put(now, process, outside)
        if process.inbox is not None and not process.free_queued:
            self._queue_free(process)
        due = process.linked.wake_at
        if due is not None:
            self._wake(process, due)

    def _to_handle(self, at: float, process: WorldNode, event: Event) -> Event | None:
        """What a node that is busy, was busy, or was to be woken handles now; None: nothing yet."""
        busy = self.now < process.busy_until
        match event:
            case TimePassed():
                if at != process.woken_at:  # an earlier one has taken its place
                    return None
                process.woken_at = math.inf
                due, clock = process.linked.wake_at, process.clock
                if due is not None and (busy or due > (self.now if clock is None else clock.reads(self.now))):
                    self._wake(process, due)
                    return None
                return event if due is not None else None
            case Free():
                if busy:  # what has waited once goes before an answer that comes then
                    self._put(process.busy_until, process, _FREE, first=True)
                    return None
                process.free_queued = False
                assert process.inbox is not None
                waited = process.inbox.popleft()
                if not process.inbox:  # an empty one is half a kilobyte
                    process.inbox = None
                return waited
        if type(event) not in _ARRIVALS:  # the answer to what kept it busy
            if busy:
                self._put(process.busy_until, process, event)
                return None
            return event
        if process.inbox is None:
            process.inbox = deque()
        process.inbox.append(event)
        if not process.free_queued:
            self._queue_free(process)
        return None

    def _queue_free(self, process: WorldNode) -> None:
        process.free_queued = True
        self._put(max(self.now, process.busy_until), process, _FREE)

    def _carry(self, process: WorldNode, effect: Send | Transmit) -> None:
        sent: Message | Frame | Parcel
        sent, again = (effect.message, False) if isinstance(effect, Send) else (effect.frame, effect.again)
        leaves = process.busy_until if process.busy_until > self.now else self.now
        payload = effect.payload
        if payload is not None and not again:
            if process.attach is not None:
                process.attach(payload)
            price = None if payload.kind == "gradient" else self._prices.get(type(effect))  # one lies where it is read
            if price is not None:
                leaves = process.busy_until = leaves + price(process.node, effect, leaves)
        if payload is not None and process.outgoing is not None:
            numbers = process.outgoing(payload, effect.to)
            if numbers is not None:
                assert isinstance(sent, Frame)
                sent = Parcel(sent, payload, numbers)
        to = self.processes.get(effect.to)
        piped = process.pipe is not None and process.pipe == effect.to
        for arrival in (leaves,) if piped else self._arrivals(process.node, effect, leaves, self._chance):
            at = arrival.arrives(self.now) if isinstance(arrival, Passage) else arrival
            what = UnderWay(sent, arrival.arrives) if isinstance(arrival, Passage) else sent
            self._count += 1
            stream = process.going if to is None or to.coming is None else to.coming
            if stream is None or (stream and at < stream[-1][0]):
                heappush(self._queue, (at, self._count, to or Absent(effect.to), process.node, what))
                continue
            stream.append((at, self._count, to or Absent(effect.to), process.node, what, stream))
            if len(stream) == 1:
                heappush(self._heads, stream[0])

    def _perform(self, process: WorldNode, effect: Effect) -> None:
        price = self._prices.get(type(effect))
        if price is not None:  # first: a host may want to know it
            begins = process.busy_until if process.busy_until > self.now else self.now
            process.busy_until = begins + price(process.node, effect, begins)
        elif type(effect) in _MEMBERSHIP:
            self._change(process, effect)
            return
        try:
            answer = process.host.perform(effect, self.now)
        except Exception as error:
            role, index = process.node.role, process.node.index
            note(error, f"in {role} {index}", role=role, index=index)
            raise
        if answer is not None:
            self._put(max(self.now, process.busy_until), process, answer)

    def _change(self, process: WorldNode, effect: Effect) -> None:
        """An effect on who there is."""
        match effect:
            case End():
                process.host.perform(effect, self.now)
                process.end = effect
                self.ended |= process.node == COORDINATOR
            case Attach(payload):
                process.host.attach(payload)
            case StartMember(newcomer):
                self.bring(newcomer, process.node)
            case KillMembers(why):
                for node in [n for n, other in self.processes.items() if other.home == process.node != n]:
                    self.kill(node, why)
            case KillMember(gone) if self.processes.get(gone, process).home != process.node or not self.kill(gone):
                self.post(process.node, ProcessEnded(gone, "it had ended"))
            case Forget(gone) if not isinstance(process.linked, Linked):  # links have done so themselves
                process.forgotten = {**(process.forgotten or {}), gone: None}

    def _wake(self, process: WorldNode, due: float) -> None:
        due = max(due if process.clock is None else process.clock.when(due), self.now, process.busy_until)
        if due < process.woken_at:
            process.woken_at = due
            self._put(due, process, _TIME_PASSED)
