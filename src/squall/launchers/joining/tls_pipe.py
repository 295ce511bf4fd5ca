"""Messages between machines over TLS, with the interface of `multiprocessing.connection.Connection`.

    4 bytes    length of the message
    n bytes    the message

Nothing here has a thread. `recv_bytes` waits for a whole message: whoever listens to several asks `poll` before.
"""

from __future__ import annotations

import os
import select
import ssl
import struct
import time
from collections import deque

from squall.transports.opening import notice_loss
from squall.transports.stream import PASS_BYTES

CHUNK_BYTES = 1 << 14  # a record of TLS
_LENGTH = struct.Struct("!I")


class TlsPipe:
    """One end. A peer that sends what is no message, or a longer one than it may, is as one that has hung up."""

    def __init__(self, connection: ssl.SSLSocket, limit: int) -> None:
        """The handshake is over; `limit` is the length of the longest message that the peer may send, in bytes.

        No more than a message is kept, and it is allocated as it comes.
        """
        connection.setblocking(False)
        notice_loss(connection)
        self.limit = limit
        self.closed = False
        self._connection = connection
        self._incoming = bytearray()
        self._outgoing: deque[memoryview] = deque()
        self._unsent = 0  # bytes
        self._over = False  # nothing comes any more
        # What OpenSSL or this object has read already does not make the socket readable.
        self._more = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready, self._watched = True, select.EPOLLIN
        self._epoll = select.epoll()
        self._epoll.register(connection, self._watched)
        self._epoll.register(self._more, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when `poll` should be asked, which goes on with what could not be written at once as well."""
        return self._epoll.fileno()

    def send_bytes(self, message: bytes | memoryview) -> None:
        """What does not go at once goes with the next calls of `poll`. Raises `OSError` when the peer is gone.

        A large message is not copied. Who makes more of them than the peer reads has to `flush`.
        """
        if self.closed or self._over:
            raise OSError("the connection is over")
        length = _LENGTH.pack(len(message))
        if len(message) < CHUNK_BYTES:
            self._outgoing.append(memoryview(length + message))
        else:
            self._outgoing += memoryview(length), memoryview(message)
        self._unsent += _LENGTH.size + len(message)
        self._write()
        self._settle()

    @property
    def unsent(self) -> int:
        """Bytes that wait for the peer to read."""
        return self._unsent

    def flush(self, unsent: int = 0) -> None:
        """Wait until no more bytes than that are unsent; the kernel ends that when the peer reads nothing at all."""
        writable = select.poll()
        writable.register(self._connection, select.POLLOUT)
        while self._unsent > unsent:
            writable.poll()
            self._write()

    def recv_bytes(self) -> bytes:
        """The next message. Raises `EOFError` when none comes any more."""
        self.poll(None)
        if not self._whole:
            raise EOFError("the connection is over")
        end = _LENGTH.size + self._length
        message = bytes(self._incoming[_LENGTH.size : end])
        del self._incoming[:end]
        self._refuse_long()
        self._settle()
        return message

    def poll(self, timeout_s: float | None = 0.0) -> bool:
        """True when `recv_bytes` does not have to wait. Without a timeout: when that is so."""
        if self.closed:
            raise OSError("the connection is closed")
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._write()
            self._read()
            self._settle()
            if self._over or self._whole:
                return True
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._epoll.poll(left)

    def close(self) -> None:
        """In this process; where it was inherited by a fork, that keeps it."""
        if not self.closed:
            self.closed = True
            self._epoll.close()
            os.close(self._more)
            self._connection.close()

    @property
    def _length(self) -> int:
        """Of the message that comes; its first bytes are here."""
        return int(_LENGTH.unpack_from(self._incoming)[0])

    @property
    def _whole(self) -> bool:
        return len(self._incoming) >= _LENGTH.size and len(self._incoming) - _LENGTH.size >= self._length

    def _write(self) -> None:
        budget = PASS_BYTES
        while self._outgoing and budget > 0:
            view = self._outgoing[0]
            try:
                count = self._connection.send(view[:PASS_BYTES])
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            except OSError:  # whether the peer has said something before it went is seen by reading
                self._outgoing.clear()
                self._unsent = 0
                return
            budget -= count
            self._unsent -= count
            if count == view.nbytes:
                self._outgoing.popleft()
            else:
                self._outgoing[0] = view[count:]

    def _read(self) -> None:
        """Until a message is whole, and no more than a pass."""
        budget = PASS_BYTES
        while not self._over and not self._whole and budget > 0:
            try:
                received = self._connection.recv(CHUNK_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError:
                received = b""
            self._over = not received
            self._incoming += received
            self._refuse_long()
            budget -= len(received)

    def _refuse_long(self) -> None:
        if len(self._incoming) >= _LENGTH.size and self._length > self.limit:
            self._incoming.clear()
            self._over = True

    def _settle(self) -> None:
        """Have `fileno` tell what is so."""
        ready = self._over or self._whole or self._connection.pending() > 0
        if ready and not self._ready:
            os.eventfd_write(self._more, 1)
        elif self._ready and not ready:
            os.eventfd_read(self._more)
        self._ready = ready
        watched = select.EPOLLIN | (select.EPOLLOUT if self._outgoing else 0)
        if watched != self._watched:
            self._epoll.modify(self._connection, watched)
            self._watched = watched
