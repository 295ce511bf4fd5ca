"""Doorbells: small frames between processes of one host, as Unix datagrams.

An exchange moves its numbers through shared memory and only has to say so. A datagram wakes its reader directly: two
switches between threads for a bell and its answer, where a message queue with threads of its own needs six. On two
cores that compute, that is most of what a small exchange costs.
"""

from __future__ import annotations

import socket
from pathlib import Path

from squall.protocol.nodes import Node

MAX_BYTES = 16 * 1024  # of a frame; a longer one is no doorbell
_SUFFIX = ".bell"


class Doorbell:
    """One bound socket, in a directory that only the user may enter; the kernel keeps the order of each sender."""

    def __init__(self, node: Node, directory: Path) -> None:
        self._directory = directory
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._socket.bind(self._address(node))
        self._addresses: dict[Node, str] = {}
        self._nodes: dict[str, Node] = {}

    def fileno(self) -> int:
        return self._socket.fileno()

    def ring(self, to: Node, frame: bytes) -> bool:
        """False if this frame has to go another way: no such peer (yet, or any more), its queue full, or too long."""
        address = self._addresses.get(to)
        if address is None:
            address = self._addresses[to] = self._address(to)
        if len(frame) > MAX_BYTES:
            return False
        try:
            self._socket.sendto(frame, address)
        except OSError:
            return False
        return True

    def take(self) -> tuple[Node, bytes] | None:
        """The next frame, if there is one; None also for what no Squall process can have sent."""
        try:
            frame, address = self._socket.recvfrom(MAX_BYTES)
        except BlockingIOError:
            return None
        node = self._nodes.get(address)
        if node is None:
            try:
                node = self._nodes[address] = Node.parse(Path(address).name.removesuffix(_SUFFIX))
            except (ValueError, TypeError):
                return None
        return node, frame

    def close(self) -> None:
        self._socket.close()

    def _address(self, node: Node) -> str:
        return f"{self._directory}/{node}{_SUFFIX}"
