"""Frames over ZeroMQ: one ROUTER socket per process, peers addressed by name.

On one host the endpoints are Unix sockets in a directory that only the user can enter.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zmq

from squall.protocol.core import Node
from squall.protocol.messages import MAX_FRAME_BYTES

TICK_S = 0.1  # timers need no finer grain than this while nothing arrives


class ZmqTransport:
    """Binds its own name if `serve`, and connects to `peers`; whoever connects to it can be answered."""

    def __init__(
        self, node: Node, directory: Path, *, serve: bool = False, peers: Iterable[Node] = (), spin_s: float = 0.0,
        wake_on: int | None = None,
    ) -> None:  # fmt: skip
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._names: dict[Node, bytes] = {}
        self._nodes: dict[bytes, Node] = {}
        socket = self._socket
        socket.setsockopt(zmq.ROUTING_ID, str(node).encode())
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a peer that is gone is an error here, not silence
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.SNDHWM, 0)  # the protocol bounds what is under way
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 5)  # ms: the server may bind a moment after its clients connect
        socket.setsockopt(zmq.LINGER, 0)
        if serve:
            socket.bind(_endpoint(directory, node))
        for peer in peers:
            socket.setsockopt(zmq.CONNECT_ROUTING_ID, self._name(peer))
            socket.connect(_endpoint(directory, peer))
        socket.setsockopt(zmq.RCVTIMEO, int(TICK_S * 1000))
        self._wake_on = wake_on
        self._spin_s = spin_s

    def send(self, to: Node, data: bytes) -> None:
        try:
            self._socket.send(self._name(to), zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise  # an unreachable peer is gone or not there yet: the link resends, the coordinator knows

    def receive(self, timeout_s: float | None) -> tuple[Node, bytes] | None:
        """The next frame, or None when the time is over or the file descriptor `wake_on` has something.

        May return None early. Looks out for `spin_s` before it sleeps.
        """
        if timeout_s == 0 or self._arrives_soon():
            return self._receive(zmq.NOBLOCK)
        if self._wake_on is None and (timeout_s is None or timeout_s >= TICK_S):
            return self._receive(0)  # the quickest way to wait, at most for a tick
        watched: list[tuple[Any, int]] = [(self._socket, zmq.POLLIN)]
        if self._wake_on is not None:
            watched.append((self._wake_on, zmq.POLLIN))
        zmq.zmq_poll(watched, -1 if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000))
        return self._receive(zmq.NOBLOCK)

    def _arrives_soon(self) -> bool:
        if not self._spin_s:
            return False
        deadline = time.perf_counter() + self._spin_s
        while not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            if time.perf_counter() > deadline:
                return False
            os.sched_yield()  # whoever else can run goes first: on few cores that may be the one we wait for
        return True

    def _receive(self, flags: int) -> tuple[Node, bytes] | None:
        try:
            name = self._socket.recv(flags)
            data = self._socket.recv(zmq.NOBLOCK)
            if self._socket.getsockopt(zmq.RCVMORE):
                while self._socket.getsockopt(zmq.RCVMORE):
                    self._socket.recv(zmq.NOBLOCK)
                return None  # more than the two parts that every Squall process sends
            return self._node(name), data
        except zmq.Again:
            return None
        except ValueError:
            return None  # a name that no Squall process has

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()

    def _name(self, node: Node) -> bytes:
        name = self._names.get(node)
        if name is None:
            name = self._names[node] = str(node).encode()
            self._nodes[name] = node
        return name

    def _node(self, name: bytes) -> Node:
        node = self._nodes.get(name)
        if node is None:
            node = Node.parse(name.decode())
            self._nodes[name] = node
            self._names[node] = name
        return node


def _endpoint(directory: Path, node: Node) -> str:
    return f"ipc://{directory}/{node}"
