"""What carries frames between the processes of one host: doorbells for exchanges, ZeroMQ for control."""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Iterable
from pathlib import Path

from squall.protocol.nodes import COORDINATOR, Node
from squall.transports.doorbell import Doorbell
from squall.transports.zeromq import Router

MAX_POLL_MS = 2**31 - 1


class HostTransport:
    """Serves its own name if `serve`, and connects to `peers`; whoever connects to it can be answered.

    What the coordinator has no part in is an exchange, and rings. A bell that is not heard (a peer that has not begun,
    a full queue) goes over ZeroMQ: links put in order what overtakes on the way.
    """

    def __init__(
        self, node: Node, directory: Path, *, serve: bool = False, peers: Iterable[Node] = (), spin_s: float = 0.0,
        wake_on: Iterable[int] = (),
    ) -> None:  # fmt: skip
        self._router = Router(node, directory, serve, peers)
        self._bell = Doorbell(node, directory) if node != COORDINATOR else None
        self._spin_s = spin_s
        self._watched = select.poll()
        own = [self._router.fileno(), *([self._bell.fileno()] if self._bell is not None else [])]
        self.wake_on([*own, *wake_on])

    def wake_on(self, descriptors: Iterable[int]) -> None:
        """`receive` returns when one of these has something, too."""
        for descriptor in descriptors:
            self._watched.register(descriptor, select.POLLIN)

    def send(self, to: Node, data: bytes) -> None:
        if self._bell is None or to == COORDINATOR or not self._bell.ring(to, data):
            self._router.send(to, data)

    def receive(self, timeout_s: float | None) -> tuple[Node, bytes] | None:
        """The next frame, or None when the time is over or a file descriptor of `wake_on` has something.

        May return None early. Looks out for `spin_s` before it sleeps.
        """
        received = self._take()
        if received is not None or timeout_s == 0:
            return received
        if self._spin_s:
            deadline = time.perf_counter() + self._spin_s
            while time.perf_counter() < deadline:
                os.sched_yield()  # whoever else can run goes first: on few cores that may be the one we wait for
                received = self._take()
                if received is not None:
                    return received
        timeout_ms = None if timeout_s is None else min(math.ceil(max(0.0, timeout_s) * 1000), MAX_POLL_MS)
        self._watched.poll(timeout_ms)
        return self._take()

    def _take(self) -> tuple[Node, bytes] | None:
        while self._router.ready:  # control first: it is rare, and exchanges could keep it waiting for ever
            received = self._router.take()
            if received is not None:
                return received
        return self._bell.take() if self._bell is not None else None

    def close(self) -> None:
        self._router.close()
        if self._bell is not None:
            self._bell.close()
