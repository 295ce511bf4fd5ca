"""A payload from one process to another over a link: by Squall's carriers, and by TLS alone."""

from __future__ import annotations

import math
import os
import select
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from benchmarks.namespaces import Link
from squall.protocol.effects import Payload
from squall.protocol.events import Event, FrameArrived, PeerReached
from squall.protocol.frames import Frame, Message
from squall.protocol.messages import Exchange
from squall.protocol.nodes import Node
from squall.runtime.processes import die_with_parent
from squall.transports.carrier import Carrier
from squall.transports.certificates import Identity
from squall.transports.stream import Views
from squall.transports.streams import Streams

REPLICA, SHARD = Node("replica", 0), Node("shard", 0)
WARM_UP = 3


def tls_seconds(link: Link, size: int, repeats: int, back: bool = False) -> float:
    """Median seconds of `size` bytes there and a byte back, or as many back."""
    numbers, answer = memoryview(bytearray(os.urandom(size))), memoryview(bytearray(size if back else 1))
    run = Identity.new_root("run")
    client, server = (run.issue(str(node)).contexts() for node in (REPLICA, SHARD))
    with link.inside(1):
        listener = socket.create_server((link.hosts[1], 0))

    def serve() -> None:
        raw, _ = listener.accept()
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with server[1].wrap_socket(raw, server_side=True) as connection:
            for _ in range(WARM_UP + repeats):
                _fill(connection, numbers)
                connection.sendall(answer)

    def exchange() -> None:
        connection.sendall(numbers)
        _fill(connection, answer)

    with forked(serve), listener:
        with link.inside(0):
            raw = socket.create_connection(listener.getsockname())
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with client[0].wrap_socket(raw) as connection:
            return _median_seconds(exchange, repeats)


class Anybody:
    """A part in a run in which everybody is believed, and all numbers lie at one place."""

    every_s = math.inf

    def __init__(self, numbers: memoryview) -> None:
        self._numbers = numbers

    def places(self, payload: Payload, peer: Node) -> Views:
        return (self._numbers,)

    def check(self, sender: Node, message: Message | None, payload: Payload | None) -> None: ...

    def admit(self, node: Node, machine: int, address: str = "") -> None: ...

    def has(self, node: Node) -> bool:
        return False

    def vouches(self, authority: str, node: Node) -> bool:
        return True

    def reports(self, node: Node) -> bool:
        return False


def carried_seconds(link: Link, size: int, repeats: int) -> float:
    """Median seconds of a message with a payload of `size` bytes, and one without back."""
    numbers = memoryview(bytearray(os.urandom(size)))

    push = Payload("gradient", REPLICA, 0, 1, 0)
    run = Identity.new_root("run")
    client, server = (run.issue(str(node)).contexts() for node in (REPLICA, SHARD))
    with link.inside(1):
        listener = socket.create_server((link.hosts[1], 0))
    address = listener.getsockname()

    def serve() -> None:
        carrier = Carrier(Streams(server, Anybody(numbers), {}, listener))
        next(arrivals(carrier, PeerReached))
        for number, _ in zip(range(1, WARM_UP + repeats + 1), arrivals(carrier, FrameArrived)):
            carrier.send(REPLICA, Frame(number, number), None)
        for _ in arrivals(carrier, PeerReached):  # until it is ended
            pass

    with forked(serve), link.inside(0):
        carrier = Carrier(Streams(client, Anybody(numbers), {SHARD: address}))
        with closing(carrier):
            next(arrivals(carrier, PeerReached))
            answers, sent = arrivals(carrier, FrameArrived), iter(range(1, 10**9))

            def exchange() -> None:
                number = next(sent)
                carrier.send(SHARD, Frame(number, number - 1, Exchange(number, gradient=0)), push)
                next(answers)

            return _median_seconds(exchange, repeats)


def tcp_bytes_s(link: Link, size: int) -> float:
    """Bytes a second in each direction, both at once, of plain TCP: `size` of them, after as many to begin with."""
    with link.inside(1):
        listener = socket.create_server((link.hosts[1], 0))
    with listener, link.inside(0):
        ours = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        theirs = [listener.accept()[0] for _ in ours]
    told = [Pipe(duplex=False) for _ in ours]

    def send(connection: socket.socket) -> None:
        while True:  # until it is ended
            connection.sendall(bytes(1 << 20))

    def receive(connection: socket.socket, teller: Connection) -> None:
        into = memoryview(bytearray(size))
        _fill(connection, into)
        start = time.perf_counter()
        _fill(connection, into)
        teller.send(size / (time.perf_counter() - start))
        while True:  # as long as the other direction is measured
            _fill(connection, into)

    senders = [partial(send, end) for end in (ours[0], theirs[1])]
    receivers = [partial(receive, end, teller) for end, (_, teller) in zip((theirs[0], ours[1]), told)]
    with forked(*senders, *receivers):
        return statistics.mean([float(mine.recv()) for mine, _ in told])


def arrivals(carrier: Carrier, kind: type[Event]) -> Iterator[Event]:
    """What comes of one kind, without end."""
    watched = select.poll()
    watched.register(carrier, select.POLLIN)
    while True:
        event = carrier.take()
        if event is None:
            watched.poll()
        elif isinstance(event, kind):
            yield event


@contextmanager
def forked(*works: Callable[[], object]) -> Iterator[None]:
    """Each is done in a process of its own, that is over afterwards."""
    parent, children = os.getpid(), []
    for work in works:
        child = os.fork()
        if not child:
            try:
                die_with_parent(parent)
                work()
            finally:
                os._exit(0)
        children.append(child)
    try:
        yield
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)


def _fill(connection: socket.socket, into: memoryview) -> None:
    while into.nbytes:
        into = into[connection.recv_into(into) :]


def _median_seconds(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(WARM_UP + repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])
