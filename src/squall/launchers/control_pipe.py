"""What the launcher, the nurseries and the coordinator speak on: small JSON messages over a pipe."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing import reduction
from typing import Any, Protocol

import msgspec


class MessageConnection(Protocol):
    """A `multiprocessing.connection.Connection`, or what is used as one."""

    @property
    def closed(self) -> bool: ...
    def fileno(self) -> int: ...
    def send_bytes(self, message: bytes | memoryview, /) -> None: ...
    def recv_bytes(self) -> bytes: ...
    def poll(self, timeout: float = 0.0, /) -> bool: ...
    def close(self) -> None: ...


class ControlPipe:
    """One end of a pipe; `open` until the other end is gone, or has sent what is no message."""

    def __init__(self, connection: MessageConnection) -> None:
        self.connection: Any = connection  # typeshed lets `wait` take its own classes alone
        self.open = True

    def say(self, **message: Any) -> None:
        self.send(msgspec.json.encode(message))

    def send(self, data: bytes | memoryview) -> None:
        """What is no message of this kind."""
        if self.open:
            with suppress(OSError):  # it is gone, as will be heard, behind its last words
                self.connection.send_bytes(data)

    def hand(self, handle: int) -> None:
        """Give the other end an open file; it must `take` it next."""
        with suppress(OSError):  # it is gone, as will be heard
            reduction.send_handle(self.connection, handle, 0)

    def take(self) -> int:
        return reduction.recv_handle(self.connection)

    def hear(self) -> dict[str, Any] | None:
        """The next message; None when the pipe is not open any more."""
        try:
            return msgspec.json.decode(self.connection.recv_bytes(), type=dict[str, Any])
        except (EOFError, OSError, ValueError, RecursionError):  # the last two: not JSON, or nested without end
            self.open = False
            return None
