"""The real shell: feeds a machine with frames and time, and carries out its effects."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from squall.errors import PeerFault
from squall.protocol.answering.effects import Answer
from squall.protocol.copied import Attach
from squall.protocol.effects import (
    AddPortions,
    Admit,
    Apply,
    CalculateVectors,
    Compute,
    Effect,
    End,
    EvaluateModel,
    Forget,
    Gather,
    JoinGroup,
    MeetParts,
    Payload,
    Step,
    Transmit,
)
from squall.protocol.events import Event, FrameArrived, PeerReached, Started, StepTaken, TimePassed
from squall.protocol.frames import Frame, decode, encode
from squall.protocol.link import Linked
from squall.protocol.nodes import Node
from squall.runtime.board import Doing, Entry

LONG_S = 0.1  # who waits for longer says for whom
AT_ONCE = 16  # events that are known of at most before the next is handled
LINGER_S = 1.5  # after its end a node waits so long for its last words to be acknowledged, and resends them once

DOING = {
    **dict.fromkeys((Compute, Step, Answer, EvaluateModel), Doing.COMPUTING),
    **dict.fromkeys((Apply, CalculateVectors, AddPortions), Doing.APPLYING),
    **dict.fromkeys((JoinGroup, Gather, MeetParts), Doing.WAITING),
}
WITH_OTHERS = (
    JoinGroup,
    Gather,
    MeetParts,
    Step,
)  # they wait, but for what a host says that it does alone


class Transport(Protocol):
    def send(self, to: Node, data: bytes) -> None: ...

    def receive(self, timeout_s: float | None) -> tuple[Node, bytes] | None: ...


class Carrier(Protocol):
    """What carries frames, with the numbers of their payloads, to peers that the transport does not reach.

    What it has wakes the transport. That a peer can be reached is told before anything is sent there, and handled
    before anything else is taken: a copied node tells its backup of every event, which may be the next that is reached.
    """

    def knows(self, node: Node) -> bool: ...

    def send(self, to: Node, frame: Frame, payload: Payload | None) -> None: ...

    def admit(self, node: Node, machine: int, address: str) -> None: ...

    def forget(self, node: Node) -> None: ...

    def take(self) -> Event | None: ...


class Host(ABC):
    """What a node's effects work on: a replica's model, a shard's store, the coordinator's record.

    Most hosts need only `perform`: numbers travel without them, nothing comes from outside, and nothing was put off.
    """

    def attach(self, payload: Payload) -> None:
        """Bring a message's numbers to their place, before the message goes out."""
        return None

    def outgoing(self, payload: Payload, to: Node) -> object | None:
        """What lies at the place, to travel with the message; None where its receiver reads the same memory."""
        return None

    def incoming(self, payload: Payload, numbers: object) -> None:
        """Put what has travelled to its place, unless something later lies there."""
        raise AssertionError("numbers have travelled within a machine")

    @abstractmethod
    def perform(self, effect: Effect, now: float) -> Event | None:
        """Carry out an effect; the event that it leads to, if any."""

    def poll(self) -> Event | None:
        """An event from outside the protocol (a process lost, a stop asked for), if there is one."""
        return None

    @property
    def wakes(self) -> Sequence[int]:
        """Descriptors that are readable when `poll` has something."""
        return ()

    @property
    def busy(self) -> bool:
        """It goes on with an effect beside what the driver does."""
        return False

    def keeps(self) -> dict[str, object]:
        """What it knows of effects that it has carried out, by the name of who knows it: for its successor."""
        return {}

    def rest(self) -> None:
        """The node is about to wait for a message: here it does what it has put off."""
        return None


class HostAround(Host):
    """A host that does something beside what another one does."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def attach(self, payload: Payload) -> None:
        self._host.attach(payload)

    def perform(self, effect: Effect, now: float) -> Event | None:
        return self._host.perform(effect, now)

    def poll(self) -> Event | None:
        return self._host.poll()

    @property
    def wakes(self) -> Sequence[int]:
        return self._host.wakes

    @property
    def busy(self) -> bool:
        return self._host.busy

    def keeps(self) -> dict[str, object]:
        return self._host.keeps()

    def rest(self) -> None:
        self._host.rest()


class Driver:
    """One node's loop. `run` returns when the machine has ended and its peers know all it had to say."""

    def __init__(
        self, linked: Linked, transport: Transport, host: Host, clock: Callable[[], float] = time.monotonic,
        carriers: Sequence[Carrier] = (), entry: Entry | None = None,
    ) -> None:  # fmt: skip
        """`entry`: where people see what this node is doing."""
        self._entry = entry or Entry()
        self._linked = linked
        self._transport = transport
        self._carriers = carriers
        self._host = host
        self._clock = clock
        self._events: deque[Event] = deque()
        self.end: End | None = None

    def run(self, poll_every_s: float = math.inf) -> End:
        """Until the machine has ended. A host that has to be polled is asked so often, though nobody says anything."""
        self.start()
        while self.end is None:
            self.step(math.inf if poll_every_s == math.inf else self._clock() + poll_every_s)
        return self.finish()

    def start(self) -> None:
        self._events.append(Started())

    def post(self, event: Event) -> None:
        """Something happened outside; the next step handles it."""
        self._events.append(event)

    def finish(self) -> End:
        """The machine has ended: stay until its peers know all it had to say."""
        assert self.end is not None
        deadline = self._clock() + LINGER_S
        while self._linked.unacknowledged and self._clock() < deadline:
            self.step(deadline)
        return self.end

    def step(self, until: float = math.inf) -> None:
        """Handle what is there, or wait for something, `until` at most."""
        if self._events:
            self._handle(self._events.popleft())
            if self._events:  # a chain of computations does not keep messages waiting
                while len(self._events) < AT_ONCE and self._receive(0):
                    pass
            return
        now = self._clock()
        wake_at = self._linked.wake_at
        if wake_at is not None and wake_at <= now:
            self._handle(TimePassed())
            return
        self._host.rest()
        latest = until if wake_at is None else min(wake_at, until)
        self._wait(None if latest == math.inf else max(0.0, latest - now), now)

    def _wait(self, timeout_s: float | None, now: float) -> None:
        entry, held, busy = self._entry, self._linked.held, self._host.busy
        if not busy:
            entry.rests()
        if not busy and not entry.names:
            entry.turns(Doing.WAITING if held else Doing.OTHER, now)
            if held:
                entry.awaits(self._linked.held_for, now)
                timeout_s = LONG_S if timeout_s is None else min(timeout_s, LONG_S)
        self._receive(timeout_s)
        if self._host.busy or not held:
            return
        if not self._events:
            entry.awaits(self._linked.awaits(), self._clock())
        elif type(event := self._events[0]) is FrameArrived:
            entry.waited(event.sender, self._clock())
        else:
            entry.turns(Doing.OTHER, self._clock())

    def _receive(self, timeout_s: float | None) -> bool:
        """Whether a message was there."""
        received = self._transport.receive(timeout_s)
        if received is not None:
            sender, data = received
            try:
                self._events.append(FrameArrived(sender, decode(data)))
            except (msgspec.DecodeError, ValueError) as error:
                raise PeerFault(f"{sender} sent something that is not a frame: {error}") from error
        for source in (*[carrier.take for carrier in self._carriers], self._host.poll):
            event = source()
            if type(event) is PeerReached:  # what is sent again comes before all that is new, here and to other peers
                self._handle(event)
            elif event is not None:
                self._events.append(event)
        return received is not None

    def _handle(self, event: Event) -> None:
        now = self._clock()
        if not self._host.busy:
            self._entry.works()
        if type(event) is StepTaken:
            self._entry.corrects(event.wait_s)
        for effect in self._linked.on(event, now):
            if isinstance(effect, Transmit):
                if effect.payload is not None and not effect.again:
                    self._entry.turns(Doing.SENDING, self._clock())
                    self._host.attach(effect.payload)
                    self._linked.did()
                for carrier in self._carriers:
                    if carrier.knows(effect.to):
                        carrier.send(effect.to, effect.frame, effect.payload)
                        break
                else:
                    self._transport.send(effect.to, encode(effect.frame))
            elif type(effect) is Attach:
                self._host.attach(effect.payload)
            elif isinstance(effect, End):
                self._host.perform(effect, now)
                self.end = effect
            elif isinstance(effect, Forget):
                for carrier in self._carriers:
                    carrier.forget(effect.node)
            elif isinstance(effect, Admit):
                for carrier in self._carriers:
                    carrier.admit(effect.node, effect.machine, effect.address)
            else:
                if (doing := DOING.get(type(effect))) is not None:
                    self._entry.begins(doing, self._clock(), type(effect) not in WITH_OTHERS)
                answer = self._host.perform(effect, now)
                if answer is not None:
                    self._events.append(answer)
            self._linked.did()
