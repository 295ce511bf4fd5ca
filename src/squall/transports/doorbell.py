"""Doorbells: small frames between processes of one host, as Unix datagrams.

An exchange moves its numbers through shared memory and only has to say so. A datagram wakes its reader directly: two
switches between threads for a bell and its answer, where a message queue with threads of its own needs six. On two
cores that compute, that is most of what a small exchange costs.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from squall.protocol.nodes import Node

MAX_BYTES = 16 * 1024  # of a frame; a longer one is no doorbell
PATH_BYTES = 107  # of a socket's name; Linux: sockaddr_un.sun_path holds 108, the last of them 0
_SUFFIX = ".bell"
LONGEST_NAME = len(f"/replica-999.99{_SUFFIX}")  # of a socket in its directory


class Doorbell:
    """One bound socket, in a directory that only the user may enter; the kernel keeps the order of each sender."""

    def __init__(self, node: Node, directory: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._address = cache(partial(_address, directory))
        with suppress(FileNotFoundError):  # of the process before this one, which has died
            os.unlink(self._address(node))
        self._socket.bind(self._address(node))

    def fileno(self) -> int:
        return self._socket.fileno()

    def ring(self, to: Node, frame: bytes) -> bool:
        """False if this frame has to go another way: no such peer (yet, or any more), its queue full, or too long."""
        if len(frame) > MAX_BYTES:
            return False
        try:
            self._socket.sendto(frame, self._address(to))
        except OSError:
            return False
        return True

    def take(self) -> tuple[Node, bytes] | None:
        """The next frame, if there is one; None also for what no Squall process can have sent."""
        try:
            frame, address = self._socket.recvfrom(MAX_BYTES)
        except BlockingIOError:
            return None
        try:
            return _node(address), frame
        except (ValueError, TypeError):
            return None

    def close(self) -> None:
        self._socket.close()


def _address(directory: Path, node: Node) -> str:
    return f"{directory}/{node}{_SUFFIX}"


@cache
def _node(address: str) -> Node:
    return Node.parse(Path(address).name.removesuffix(_SUFFIX))
