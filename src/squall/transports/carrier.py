"""A thread that carries frames and numbers between machines while its process computes."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from contextlib import suppress

from squall.protocol.effects import Payload
from squall.protocol.events import Event
from squall.protocol.frames import Frame
from squall.protocol.nodes import Node
from squall.transports.streams import Streams


class Carrier:
    """`Streams` that need nobody's attention. All methods are for the process's own thread."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._lock = threading.Lock()  # held by whoever works on the streams, for a turn
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # for the process: something has arrived
        self._work = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # for the thread: there is more to carry
        self._closed = False
        self._failed: BaseException | None = None  # what has ended the thread
        self._thread = threading.Thread(target=self._run, name="squall carrier", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Readable when something has arrived."""
        return self._news

    def knows(self, node: Node) -> bool:
        return self._streams.knows(node)

    def send(self, to: Node, frame: Frame, payload: Payload | None) -> None:
        with self._lock:
            self._streams.send(to, frame, payload)
        os.eventfd_write(self._work, 1)

    def take(self) -> Event | None:
        """What has arrived, in its order: a frame whose numbers are at their place, or that a peer can be reached."""
        if not self._streams.news:
            with suppress(BlockingIOError):
                os.eventfd_read(self._news)
            if self._failed is not None:
                raise RuntimeError("nothing is carried to other machines any more") from self._failed
            if not self._streams.news:  # nor has anything come since
                return None
        with self._lock:
            return self._streams.take()

    def admit(self, node: Node, machine: int, address: str = "") -> None:
        with self._lock:
            self._streams.admit(node, machine, address)
        os.eventfd_write(self._work, 1)

    def forget(self, node: Node) -> None:
        """When this returns, nothing that the peer sends is put anywhere any more."""
        with self._lock:
            self._streams.forget(node)

    def close(self) -> None:
        self._closed = True
        os.eventfd_write(self._work, 1)
        self._thread.join()
        self._streams.close()
        os.close(self._news)
        os.close(self._work)

    def _run(self) -> None:
        try:
            self._carry()
        except BaseException as error:  # the process would wait for ever
            self._failed = error
            os.eventfd_write(self._news, 1)

    def _carry(self) -> None:
        watched = select.poll()
        watched.register(self._streams, select.POLLIN)
        watched.register(self._work, select.POLLIN)
        while not self._closed:
            with self._lock:
                self._streams.turn(time.monotonic())
                wake_at = self._streams.wake_at
                if self._streams.news:
                    os.eventfd_write(self._news, 1)
            timeout_ms = None if wake_at == math.inf else max(0, math.ceil((wake_at - time.monotonic()) * 1000))
            for descriptor, _ in watched.poll(timeout_ms):
                if descriptor == self._work:
                    os.eventfd_read(self._work)
