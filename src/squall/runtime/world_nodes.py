"""The processes of a world: what it knows of each, and of what is on its way to them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from squall.protocol.effects import Effect, End, Payload
from squall.protocol.events import Event, FrameArrived, Started
from squall.protocol.frames import Frame
from squall.protocol.link import Linked
from squall.protocol.machine import Machine
from squall.protocol.nodes import COORDINATOR, NURSERY, Node
from squall.runtime.driver import Host

HUBS = ("coordinator", "shard")  # roles that all other nodes exchange messages with


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


class Parcel(NamedTuple):
    """A frame with the numbers of its payload, between hosts that share no memory."""

    frame: Frame
    payload: Payload
    numbers: object


class UnderWay(NamedTuple):
    """What was sent, and when it arrives at a time of the world's, as `Passage.arrives` tells."""

    sent: Any
    arrives: Callable[[float], float]


class ParcelArrived(FrameArrived, frozen=True, gc=False):
    """Its numbers go to their place when the node looks at the frame."""

    payload: Payload
    numbers: object


class Answer(Event, frozen=True, gc=True):  # it may hold the world in whose queue it is
    """An event that is made when the node looks at it, with all that this changes."""

    make: Callable[[], Event]


class Free(Event, frozen=True, gc=False):
    """A process that was busy can look into its inbox."""


class Premises(Host):
    """A nursery's: the world itself starts and kills its processes."""

    def perform(self, effect: Effect, now: float) -> Event | None:
        return None


class WorldNode:
    """A process in the world: its machine and host, and what it is doing."""

    __slots__ = (
        "alive", "attach", "busy_until", "clock", "coming", "end", "forgotten", "free_queued", "going", "home", "host",
        "inbox", "linked", "node", "outgoing", "pipe", "poll", "woken_at",
    )  # fmt: skip

    def __init__(self, node: Node, linked: Linked | Machine, host: Host, clock: Clock | None, home: Node) -> None:
        self.node = node
        self.home = home  # the nursery of its machine
        # With whom it speaks without a wire.
        self.pipe = home if node == COORDINATOR else COORDINATOR if node == NURSERY else None
        self.alive = True  # it was added, and not killed
        self.linked = linked  # a machine with links or without
        self.forgotten: dict[Node, None] | None = None  # senders whose messages a machine without links drops
        self.host = host
        # None: the host has nothing to do for a message, and is not called for each.
        self.attach = host.attach if type(host).attach is not Host.attach else None
        self.outgoing = host.outgoing if type(host).outgoing is not Host.outgoing else None
        self.clock = clock  # None: the world's own
        self.busy_until = 0.0
        self.poll = host.poll if node == COORDINATOR else None  # others hear nothing from outside
        self.coming: Stream | None = None  # on its way to this node, in the order of arrival
        self.going: Stream | None = None  # on its way from this node, likewise
        if node.role in HUBS:
            self.coming, self.going = deque(), deque()
        self.inbox: deque[Event] | None = deque([Started()])  # its start, and then what came while it was busy
        self.free_queued = False  # a `Free` is in the queue: as long as something is in the inbox
        self.woken_at = math.inf  # the earliest `TimePassed` in the queue
        self.end: End | None = None

    @property
    def over(self) -> bool:
        """The process is gone: its machine has ended and its peers know all that it had to say."""
        return self.end is not None and not (isinstance(self.linked, Linked) and self.linked.unacknowledged)


class Absent:
    """Stands in the queue for a node that had not come when something was put there for it."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node


# (time, tie-breaking number, receiver, None, event), or (time, number, receiver, sender, message). A message becomes an
# event only when it arrives: tens of thousands are on their way, and objects that they do not have fit into no cache.
Entry = tuple[float, int, WorldNode | Absent, Node | None, Any]
# What hubs hear and say mostly arrives in the order in which it was sent. It waits in streams instead of the queue; an
# entry of a stream names it.
Stream = deque[tuple[float, int, WorldNode | Absent, Node | None, Any, "Stream"]]
