"""What may be said by the role that says it, at any moment and with any values, costs the one who says it.

The receivers are real: machines, hosts, a record. Members are not: they say what chance says.
"""

from __future__ import annotations

import dataclasses
import random
import typing
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

import squall
from squall.launchers.inline import LoneChannel, own_host
from squall.plan import build_checked, make_plan
from squall.protocol.collective.messages import Finished, Shown, ShowWeights, Turn
from squall.protocol.effects import Payload
from squall.protocol.events import Event, FrameArrived
from squall.protocol.frames import Frame, decode, encode
from squall.protocol.heartbeats import Pulse
from squall.protocol.messages import (
    Join,
    Member,
    SnapshotTaken,
    Stats,
    TakeSnapshot,
    View,
    ViewSeen,
    Weights,
    Welcome,
)
from squall.protocol.nodes import COORDINATOR, Node
from squall.runtime.driver import Driver, Host
from squall.runtime.job import Job, private_job
from squall.runtime.kinds import kind_of, machine
from squall.runtime.part import Part
from squall.runtime.pieces import Pieces, PiecesHost
from squall.runtime.places import Places
from squall.runtime.recorder import CoordinatorHost
from squall.runtime.run_plan import Aims
from squall.runtime.site import Site
from squall.runtime.traffic import TrafficHost
from squall.transports.certificates import Identity
from tests import deep
from tests.tasks import INLINE, regression

R0, R1, SHARD, FAR = Node("replica", 0), Node("replica", 1), Node("shard", 0), Node("shard", 1)
SEATS = {("coordinator", 0): 0, ("shard", 0): 0, ("replica", 0): 0, ("evaluator", 2): 0}
SITE = Site(
    0, {**SEATS, ("replica", 1): 1, ("shard", 1): 1}, {}, Identity("", b"", b"", b""), {}, {0: 2, 1: 2}, Pulse(0.5, 2.0)
)
LIARS = {COORDINATOR: (R1, FAR, Node("nursery", 1)), SHARD: (R1,), R0: (FAR,)}
STRATEGIES = [
    squall.Downpour(replicas=2, shards=2), squall.Synchronous(replicas=2, shards=2),
    squall.AsynchronousSGD(replicas=2, shards=2, staleness="scale"),
    squall.Sandblaster(replicas=2, shards=2, batch="full"), squall.AllReduce(replicas=2),
]  # fmt: skip


class Line:
    """Both transport and carrier: what is put there comes in, and what goes out is gone."""

    def __init__(self) -> None:
        self.arriving: deque[Event] = deque()
        self.forgotten: list[Node] = []
        self.asked: list[tuple[Node, Any]] = []  # of the shard, or replica, on this machine

    def knows(self, node: Node) -> bool:
        return True

    def send(self, to: Node, frame: Frame, payload: Payload | None = None) -> None:
        if to in (SHARD, R0):
            self.asked.append((to, frame.message))

    def admit(self, node: Node, machine: int, address: str = "") -> None: ...

    def forget(self, node: Node) -> None:
        self.forgotten.append(node)

    def take(self) -> Event | None:
        return self.arriving.popleft() if self.arriving else None

    def receive(self, timeout_s: float | None) -> None: ...


class Receiver:
    """A process of a run on two machines. What is on its own says what it should."""

    def __init__(self, job: Job, node: Node) -> None:
        self.line, self.node, self.now = Line(), node, 0.0
        places = Places(node, job.recipe.shards, job.ranges, job.arena.shape, memoryview(job.arena.memory), Pieces())
        self.part = Part(node, SITE, kind_of(job).says, places)
        self.linked = machine(job, node)
        line: Any = self.line
        self.driver = Driver(self.linked, line, _host(job, node), lambda: self.now, carriers=(line,))
        self.driver.start()
        self._numbers: Counter[Node] = Counter()
        self._clock = 0  # of the replica that says what it should
        for sender, message in HONEST[node]:
            self.hear(sender, message)

    def hear(self, sender: Node, message: Any) -> None:
        self._numbers[sender] += 1
        self.line.arriving.append(FrameArrived(sender, Frame(self._numbers[sender], 0, message)))
        for _ in range(12):
            self.driver.step(0.0)
        self.now += 0.01

    def answer(self) -> None:
        """Of the other shard, or replica, where the coordinator has asked something."""
        asked, self.line.asked = self.line.asked, []
        for node, message in asked:
            match message:
                case View(number):
                    self.hear(node, ViewSeen(number, (), self._clock))
                case TakeSnapshot(number):
                    self.hear(node, SnapshotTaken(number, 1, ()))
                case Turn(clock):
                    self._clock = clock
                    self.hear(node, Finished(clock, Stats()))
                case ShowWeights(number):
                    self.hear(node, Shown(number, Weights(self._clock, 0, 0.0)))

    @property
    def over(self) -> bool:
        """It has ended, or the one who lies is heard no more."""
        return self.driver.end is not None or bool(self.line.forgotten)


HONEST: dict[Node, list[tuple[Node, Any]]] = {
    COORDINATOR: [(R0, Join(1)), (R1, Join(2))],
    SHARD: [(COORDINATOR, View(1, (Member(0, 0, 0), Member(1, 0, 0))))],
    R0: [(COORDINATOR, Welcome(0))],
}


def _host(job: Job, node: Node) -> Host:
    if node != COORDINATOR:
        return own_host(job, node)
    recorder = CoordinatorHost(job, LoneChannel())
    return PiecesHost(TrafficHost(recorder, job, SITE), job.directory, Pieces())


def chosen(chance: random.Random, kind: Any) -> Any:
    """A value of a type, often one that may fit."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return chosen(chance, arguments[0])
    if origin is typing.Union or type(kind).__name__ == "UnionType":
        return chosen(chance, chance.choice(arguments))
    if origin is tuple:
        each = arguments[:1] * chance.choice((0, 1, 2, 9)) if arguments[-1] is ... else arguments
        return tuple(chosen(chance, part) for part in each)
    if origin is dict:
        return {chosen(chance, arguments[0]): chosen(chance, arguments[1]) for _ in range(chance.randrange(3))}
    if kind is Node:
        return chance.choice([R0, R1, SHARD, FAR, COORDINATOR, Node("nursery", 1), Node("replica", 1, 7)])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        return kind(*(chosen(chance, hints[name]) for name in kind.__struct_fields__))
    values: dict[Any, tuple[Any, ...]] = {
        bool: (True, False), type(None): (None,), str: ("", "a", "loss", "\x1b[2J\0", "x" * 5000),
        int: (-1, *(0,) * 9, *(1,) * 6, 2, 2, 2, 3, 4, 5, 16, 1 << 20, 1 << 24, 1 << 31, 1 << 53),
        float: (0.0, 1.0, -1.0, 1e-300, 1e9, 1e300, float("inf"), float("nan")),
    }  # fmt: skip
    return chance.choice(values[kind])


def lies(chance: random.Random, job: Job, node: Node) -> Iterator[tuple[Node, Any]]:
    """Valid messages of all types that may come to the node."""
    liars = [sender for sender in LIARS[node] if sender.role != "shard" or job.recipe.shards]
    says = {sender: sorted(kind_of(job).says[sender.role, node.role], key=str) for sender in liars}
    while True:
        sender = chance.choice(liars)
        with suppress(msgspec.ValidationError):  # values beyond what this one may have
            yield sender, decode(encode(Frame(1, 0, chosen(chance, chance.choice(says[sender]))))).message


CASES = [(node, each) for node in LIARS for each in STRATEGIES if each.recipe().shards or node == COORDINATOR]


@pytest.mark.parametrize(("node", "strategy"), CASES, ids=[f"{type(each).__name__}-{node}" for node, each in CASES])
def test_lies_of_a_member_cost_the_member(node: Node, strategy: squall.Strategy, tmp_path: Path) -> None:
    """2,000 to each receiver in `make deep`, of each strategy."""
    plan = make_plan(strategy, dataclasses.replace(INLINE, snapshot_every_s=0.1), Aims(epochs=100))
    task, layout = build_checked(regression(), plan, strategy)
    job = private_job(plan, strategy, task, layout, tmp_path)
    wanted, told, over = len(deep.sweep(range(2_000), 200)), 0, 0
    receiver = Receiver(job, node)
    for sender, message in lies(random.Random(16), job, node):
        if receiver.over:
            receiver, over = Receiver(job, node), over + 1
        try:
            receiver.part.check(sender, message, None)
        except ValueError:
            continue
        receiver.hear(sender, message)
        receiver.answer()
        told += 1
        if told == wanted:
            break
    assert over
