"""The real shell: what goes wrong between processes has a name, and nothing hangs."""

from __future__ import annotations

import math
from collections import deque
from itertools import permutations

import pytest

from squall.errors import PeerFault
from squall.protocol.effects import Effect, End, Payload, Send
from squall.protocol.events import Event, MessageArrived, PeerReached, Started, TimePassed
from squall.protocol.frames import Frame, encode
from squall.protocol.link import Linked
from squall.protocol.messages import Join, Stop
from squall.protocol.nodes import COORDINATOR, Node
from squall.runtime.driver import LINGER_S, Driver, Host


class Wire:
    """A transport that is a list, under a clock that the waits move."""

    def __init__(self, *arriving: bytes) -> None:
        self.arriving = deque(arriving)
        self.sent: list[tuple[Node, bytes]] = []
        self.now = 0.0

    def send(self, to: Node, data: bytes) -> None:
        self.sent.append((to, data))

    def receive(self, timeout_s: float | None) -> tuple[Node, bytes] | None:
        if self.arriving:
            return COORDINATOR, self.arriving.popleft()
        assert timeout_s is not None, "it would wait for ever"
        self.now += timeout_s
        return None


class Machine:
    """Joins, and ends when it is told to stop or when its time has come."""

    node = Node("replica")

    def __init__(self, wake_at: float | None = None) -> None:
        self.wake_at = wake_at
        self.seen: list[Event] = []

    def on(self, event: Event, now: float) -> list[Effect]:
        self.seen.append(event)
        match event:
            case Started():
                return [Send(COORDINATOR, Join(1))]
            case MessageArrived(_, Stop()) | TimePassed():
                self.wake_at = None
                return [End("told to")]
        return []


class Nothing(Host):
    def perform(self, effect: Effect, now: float) -> Event | None:
        return None


def drive(machine: Machine, wire: Wire) -> End:
    return Driver(Linked(machine), wire, Nothing(), lambda: wire.now).run()


def test_a_node_runs_from_its_start_to_its_end() -> None:
    machine, wire = Machine(), Wire(encode(Frame(1, 1, Stop())))
    assert drive(machine, wire) == End("told to")
    assert [type(event) for event in machine.seen] == [Started, MessageArrived]
    assert wire.sent[0] == (COORDINATOR, encode(Frame(1, 0, Join(1))))
    assert wire.now == 0, "its join was acknowledged: there is nothing to linger for"


def test_time_that_a_machine_waits_for_comes() -> None:
    machine, wire = Machine(wake_at=0.25), Wire()
    drive(machine, wire)
    assert type(machine.seen[-1]) is TimePassed
    assert wire.now == pytest.approx(0.25 + LINGER_S, abs=0.06), "then it lingers, because its join is unanswered"


GARBAGE = [b"", b"\xff\xfe garbage", b"\x93\x01\x00\x91\xa4boom", encode(Frame(1, 0, Stop()))[:-1], b"\x80\x04K\x01."]


def test_a_host_that_has_to_be_polled_is_though_nobody_says_anything() -> None:
    polled: list[float] = []

    class Polled(Nothing):
        def poll(self) -> Event | None:
            polled.append(wire.now)
            return None

    wire = Wire()
    driver = Driver(Linked(Machine(wake_at=1.1)), wire, Polled(), lambda: wire.now)
    driver.run(poll_every_s=0.25)
    assert polled[:4] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("data", GARBAGE)
def test_what_is_no_frame_is_a_peers_fault(data: bytes) -> None:
    with pytest.raises(PeerFault, match=r"coordinator-0\.0 sent something that is not a frame"):
        drive(Machine(), Wire(data))


class Broken:
    """A carrier whose connection to the coordinator has just come back."""

    def __init__(self) -> None:
        self.news: deque[Event] = deque()
        self.sent: list[int] = []

    def knows(self, node: Node) -> bool:
        return node == COORDINATOR

    def send(self, to: Node, frame: Frame, payload: Payload | None) -> None:
        self.sent.append(frame.number)

    def admit(self, node: Node, machine: int, address: str = "") -> None:
        raise AssertionError

    def forget(self, node: Node) -> None:
        raise AssertionError

    def take(self) -> Event | None:
        return self.news.popleft() if self.news else None


class Talker:
    """Answers everything that it hears."""

    node, wake_at = Node("replica"), None

    def on(self, event: Event, now: float) -> list[Effect]:
        return [Send(COORDINATOR, Join(1))]


def test_what_is_sent_again_comes_before_what_is_new() -> None:
    """A connection does not carry a number that is less than one before it."""
    carrier, wire = Broken(), Wire()
    driver = Driver(Linked(Talker()), wire, Nothing(), lambda: wire.now, carriers=(carrier,))
    driver.start()
    driver.step(0.0)
    carrier.news.append(PeerReached(COORDINATOR))
    driver.post(TimePassed())
    driver.post(Started())
    driver.post(Started())
    for _ in range(4):
        driver.step(0.0)
    assert carrier.sent == [1, 1, 2, 3]


class Connections(Broken):
    """Carries what is sent to a peer from when that was told of, and no number that is less than one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.carried: dict[Node, list[int]] = {}

    def knows(self, node: Node) -> bool:
        return True

    def send(self, to: Node, frame: Frame, payload: Payload | None) -> None:
        if frame.number > max(self.carried.get(to, [math.inf]), default=0):
            self.carried[to].append(frame.number)

    def take(self) -> Event | None:
        event = super().take()
        if isinstance(event, PeerReached):
            self.carried[event.node] = []
        return event


class Telling(Linked):
    """Tells one peer of every event, as a copied node tells its backup."""

    def on(self, event: Event, now: float) -> list[Effect]:
        new = [] if event == PeerReached(COORDINATOR) else [self._send(Send(COORDINATOR, Join(1)), now)]
        return [*super().on(event, now), *new]


@pytest.mark.parametrize("reached", [*permutations([COORDINATOR, Node("replica", 1)])])
def test_of_two_peers_that_are_reached_at_once_each_gets_all_from_the_first_on(reached: tuple[Node, ...]) -> None:
    carrier, wire = Connections(), Wire()
    driver = Driver(Telling(Machine()), wire, Nothing(), lambda: wire.now, carriers=(carrier,))
    driver.start()
    driver.step(0.0)
    carrier.news += map(PeerReached, reached)
    wire.arriving += [encode(Frame(0, 0))] * len(reached)  # each time that the driver looks, something is there
    driver.post(TimePassed())
    driver.post(TimePassed())
    for _ in range(9):
        driver.step(0.0)
    carried = carrier.carried[COORDINATOR]
    assert len(carried) > 1
    assert carried == list(range(1, 1 + len(carried)))
