"""What carries frames between the processes of one host: doorbells for exchanges, ZeroMQ for control."""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Iterable
from pathlib import Path

from squall.protocol.core import COORDINATOR, Node
from squall.transports.doorbell import Doorbell
from squall.transports.zeromq import Router

BELLS_IN_A_ROW = 16  # then control is looked for: exchanges could keep it waiting for ever


class HostTransport:
    """Serves its own name if `serve`, and connects to `peers`; whoever connects to it can be answered.

    What the coordinator has no part in is an exchange, and rings. A bell that is not heard (a peer that has not begun,
    a full queue) goes over ZeroMQ: links put in order what overtakes on the way.
    """

    def __init__(
        self, node: Node, directory: Path, *, serve: bool = False, peers: Iterable[Node] = (), spin_s: float = 0.0,
        wake_on: int | None = None,
    ) -> None:  # fmt: skip
        self._router = Router(node, directory, serve, peers)
        self._bell = Doorbell(node, directory) if node != COORDINATOR else None
        self._bells = 0  # taken since control was looked for
        self._spin_s = spin_s
        self._watched = select.poll()
        for descriptor in (self._router, self._bell, wake_on):
            if descriptor is not None:
                self._watched.register(descriptor, select.POLLIN)

    def send(self, to: Node, data: bytes) -> None:
        if self._bell is None or to == COORDINATOR or not self._bell.ring(to, data):
            self._router.send(to, data)

    def receive(self, timeout_s: float | None) -> tuple[Node, bytes] | None:
        """The next frame, or None when the time is over or the file descriptor `wake_on` has something.

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
        self._watched.poll(None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000))
        return self._take()

    def _take(self) -> tuple[Node, bytes] | None:
        """When there is nothing it has looked at ZeroMQ, as whoever sleeps on that one's descriptor must have."""
        if self._bell is not None and self._bells < BELLS_IN_A_ROW:
            received = self._bell.take()
            if received is not None:
                self._bells += 1
                return received
        self._bells = 0
        return self._router.take() if self._router.ready else None

    def close(self) -> None:
        self._router.close()
        if self._bell is not None:
            self._bell.close()
