"""Where a link is slow, one process of a machine after the other sends its numbers to the machine at the other end.

Connections that send at once share a link, and the numbers of all arrive when those of the last do. One after the
other, all but the last arrive sooner. Two machines that exchange with each other gain more: while one gets weights, it
sends nothing, and if the other one's gradients share that way, they come to use one direction of the link at a time,
and keep to that. In a lane who comes later waits, and then they exchange together, in both directions.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from pathlib import Path
from typing import Protocol

from squall.protocol.nodes import COORDINATOR, Node

FAST = 500e6  # bytes a second: beyond that numbers wait for processors, of which each process may have its own
FAR_S = 5e-3  # of a round trip: beyond that a connection alone may not fill the link, for want of memory in the kernel
PATIENCE_S, PATIENCE = 0.5, 3.0  # with who has the turn, and so many times what the own one takes: it may stand still
PATIENCE_AT_MOST_S = 5.0
REST_S = 30.0  # behind a wait that was in vain, in which nobody is waited for
TRY_AGAIN_S = 0.002
_MIN_RTT = struct.Struct("148xI")  # in what Linux tells of a connection of TCP: microseconds


def near(connection: socket.socket) -> bool:
    """Whether the other end is so near that a connection alone fills the link."""
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
    return len(told) == _MIN_RTT.size and _MIN_RTT.unpack(told)[0] < FAR_S * 1e6


class Lanes:
    """Of one process. `directory` is one that all processes of this machine know, or None: then there are none."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._lanes: dict[str, Lane] = {}  # by the name of the machine

    def to(self, machine: str, peer: Node) -> Lane:
        """The lane to a process there. The coordinator's files wait for nobody: a stop waits for them, and not long."""
        if peer == COORDINATOR:
            return Lane()
        lock = None if self._directory is None else self._directory / f"to-{machine}"
        return self._lanes.setdefault(machine, Lane(lock))

    def close(self) -> None:
        """In this process; where they were inherited by a fork, that keeps them."""
        for lane in self._lanes.values():
            lane.close()


class Sender(Protocol):
    """What has numbers to send."""

    sent_bytes: int


class Lane:
    """Of one process, to one other machine. `lock` is a file that all of this machine's processes know; None: no lane.

    It is the kernel that has the lock, and opens it when a process dies.
    """

    def __init__(self, lock: Path | None = None) -> None:
        self._lock = lock
        self._file: int | None = None  # descriptor of that, once it is needed
        self._sender: Sender | None = None  # whose turn it is, if it is this process's
        self._since: tuple[float, int] = (0.0, 0)  # its begin, and what the sender had sent before
        self._took_s = 0.0  # of the last turn
        self._fast = False
        self._waits: dict[Sender, float] = {}  # since when, for whoever has the turn
        self._turned_ns = 0  # when that one's turn began, by the clock of files
        self._rests_until = 0.0

    def take(self, sender: Sender, now: float) -> bool:
        """Whether it may send now: it is its turn, or it is not to wait for one. It asks again if not."""
        if self._lock is None or self._sender is sender:
            return True
        if self._sender is None and self._locked():
            self._sender, self._since = sender, (now, sender.sent_bytes)
            self._waits.pop(sender, None)
            return True
        if self._file is not None and (turned_ns := os.fstat(self._file).st_mtime_ns) != self._turned_ns:
            self._turned_ns, self._waits = turned_ns, dict.fromkeys(self._waits, now)
        waited_s = now - self._waits.setdefault(sender, now)
        if waited_s > min(PATIENCE_S + PATIENCE * self._took_s, PATIENCE_AT_MOST_S):
            self._rests_until = now + REST_S
        if self._fast or now < self._rests_until:
            del self._waits[sender]
            return True
        return False

    def leave(self, sender: Sender, now: float | None = None) -> None:
        """It has nothing more to send; `now` is given where all of it was sent."""
        self._waits.pop(sender, None)
        if self._sender is not sender:
            return
        self._sender = None
        if now is not None:
            began, before = self._since
            self._took_s = now - began
            self._fast = sender.sent_bytes - before > FAST * self._took_s
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """In this process; where it was inherited by a fork, that keeps it."""
        if self._file is not None:
            os.close(self._file)
        self._file = self._lock = None

    def _locked(self) -> bool:
        assert self._lock is not None
        try:
            if self._file is None:
                self._file = os.open(self._lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.utime(self._file, ns=(time.time_ns(),) * 2)  # those who wait see that it goes on
        except BlockingIOError:
            return False
        except OSError:  # there are no more descriptors, say: then it shares the link
            self.close()
        return True
