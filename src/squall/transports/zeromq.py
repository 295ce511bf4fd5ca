"""Frames over ZeroMQ: one ROUTER socket per process, peers addressed by name."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import zmq

from squall.protocol.frames import MAX_FRAME_BYTES
from squall.protocol.nodes import Node

_POLLIN = int(zmq.POLLIN)  # an enum's own arithmetic takes longer than the question


class Router:
    """Binds its own name if `serve`, and connects to `peers`; whoever connects to it can be answered.

    The endpoints are Unix sockets in `directory`, which only the user may enter.
    """

    def __init__(self, node: Node, directory: Path, serve: bool, peers: Iterable[Node]) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        socket = self.socket
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
            socket.setsockopt(zmq.CONNECT_ROUTING_ID, _name(peer))
            socket.connect(_endpoint(directory, peer))

    def send(self, to: Node, data: bytes) -> None:
        try:
            self.socket.send(_name(to), zmq.NOBLOCK | zmq.SNDMORE)
            self.socket.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise  # an unreachable peer is gone or not there yet: the link resends, the coordinator knows

    def fileno(self) -> int:
        """Becomes readable when something may have come after `ready` was False; before, it need not."""
        return int(self.socket.getsockopt(zmq.FD))

    @property
    def ready(self) -> bool:
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & _POLLIN)

    def take(self) -> tuple[Node, bytes] | None:
        """The next frame, if there is one; None also for what no Squall process can have sent."""
        try:
            name = self.socket.recv(zmq.NOBLOCK)
            data = self.socket.recv(zmq.NOBLOCK)
            if self.socket.getsockopt(zmq.RCVMORE):
                while self.socket.getsockopt(zmq.RCVMORE):
                    self.socket.recv(zmq.NOBLOCK)
                return None  # more than the two parts that every Squall process sends
            return _node(name), data
        except (zmq.Again, ValueError):  # nothing is there, or it has a name that no Squall process has
            return None

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


@cache
def _name(node: Node) -> bytes:
    return str(node).encode()


@cache
def _node(name: bytes) -> Node:
    return Node.parse(name.decode())


def _endpoint(directory: Path, node: Node) -> str:
    return f"ipc://{directory}/{node}"
