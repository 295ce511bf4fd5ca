"""A machine that has the token, and whose processes are not Squall's: the run goes on without it."""

from __future__ import annotations

import math
import signal
import time
from collections import defaultdict, deque
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import cloudpickle

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.joining.address import parse_address
from squall.launchers.joining.call import Call
from squall.launchers.joining.joining import join
from squall.launchers.joining.token import find_token
from squall.launchers.orders import Facts, Member, Orders
from squall.protocol.effects import Payload
from squall.protocol.events import Event, FrameArrived, PeerReached
from squall.protocol.frames import Frame, Message
from squall.protocol.messages import Exchange, Join, Welcome
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.nursery_messages import Alive, StartProcess
from squall.report import Reader
from squall.report.coverage import audit
from squall.runtime.site import Site
from squall.transports.stream import Views
from squall.transports.streams import Streams
from tests.launchers.blobs import task
from tests.launchers.processes import wait_for
from tests.launchers.test_machines import CORES, cluster

SOON_S = 30.0
SHARD = Node("shard")


class Liar:
    """A process of the machine, in this one: it believes everybody, and says what it is told to."""

    every_s = math.inf

    def __init__(self, site: Site, node: Node) -> None:
        addresses = {peer: address for peer, address in site.addresses.items() if peer in (COORDINATOR, SHARD)}
        self.streams = Streams(site.identity.issue(str(node)).contexts(), self, addresses)
        self.heard: deque[Event] = deque()
        self._said: defaultdict[Node, list[Frame]] = defaultdict(list)

    def places(self, payload: Payload, peer: Node) -> Views:
        return (memoryview(bytearray(1 << 20)),)

    def check(self, sender: Node, message: Message | None, payload: Payload | None) -> None: ...

    def admit(self, node: Node, machine: int, address: str = "") -> None: ...

    def has(self, node: Node) -> bool:
        return False

    def vouches(self, authority: str, node: Node) -> bool:
        return True

    def reports(self, node: Node) -> bool:
        return False

    def turn(self) -> bool:
        self.streams.turn(time.monotonic())
        while (event := self.streams.take()) is not None:
            self.heard.append(event)
            if isinstance(event, PeerReached):  # a connection that it takes the place of may have brought nothing
                for frame in self._said[event.node]:
                    self.streams.send(event.node, frame)
        return True

    def say(self, to: Node, message: Message) -> None:
        wait_for(lambda: self.turn() and PeerReached(to) in self.heard, SOON_S, f"a connection to {to}")
        self._said[to].append(Frame(1 + len(self._said[to]), 0, message))
        self.streams.send(to, self._said[to][-1])

    def heard_of(self, kind: type) -> list[Any]:
        self.turn()
        frames = [event.frame for event in self.heard if isinstance(event, FrameArrived)]
        return [frame.message for frame in frames if isinstance(frame.message, kind)]


def test_a_machine_whose_replica_lies_is_lost_and_the_run_goes_on(tmp_path: Path) -> None:
    with cluster(tmp_path, 1, "--replicas", f"1..{CORES + 1}", "--threads", "1", "--epochs", "100000") as found:
        found.event("started", "")
        site = admitted(found.address, found.directory / "token", tmp_path)
        nursery = Liar(site, Node("nursery", site.machine))
        nursery.say(COORDINATOR, Alive())
        wait_for(lambda: nursery.heard_of(StartProcess), SOON_S, "a replica to be started")
        (start,) = nursery.heard_of(StartProcess)
        replica = Liar(site, start.node)
        replica.say(COORDINATOR, Join(1))
        wait_for(lambda: replica.heard_of(Welcome) and nursery.turn(), SOON_S, "a welcome")
        for _ in range(2):
            replica.say(SHARD, Exchange(5, gradient=0, examples=16, batches=1))
        why = f"{start.node} was refused: it pushes for clock 5"
        told = f"machine 1, with 1 processes: {why}"
        wait_for(
            lambda: replica.turn() and nursery.turn() and found.told("lost", told), SOON_S, "the machine to be lost"
        )
        found.event("warning", f"replica {start.node.index} waits: no machine has room for it")
        found.run.process.send_signal(signal.SIGINT)
        assert found.run.finish()[0] == 130
    for liar in (nursery, replica):
        liar.streams.close()
    reader = Reader(found.directory / "run.sqlite")
    assert audit(reader).complete
    reader.close()


def admitted(address: str, token: Path, own: Path) -> Site:
    """What a machine that has joined is told, up to the beginning."""
    host, port = parse_address(address, "address")
    found = join(Call((host, port), find_token(str(token)), SOON_S), print)
    head = ControlPipe(found.pipe)
    plan = cloudpickle.loads(head.connection.recv_bytes())["plan"]
    ours, _theirs = Pipe()
    member = Member(found.machine, found.identity, host, ControlPipe(ours), own)
    head.say(kind="built", facts=Facts.of(task()))
    orders = Orders(head, member)
    order = orders.next(plan)
    assert order is not None
    assert order.site is not None
    assert orders.may_begin()
    return order.site
