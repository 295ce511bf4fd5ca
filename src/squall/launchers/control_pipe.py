"""What the launcher, the nursery and the coordinator speak on: small JSON messages over a pipe."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import msgspec


class ControlPipe:
    """One end of a pipe; `open` until the other end is gone."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.open = True

    def say(self, **message: Any) -> None:
        if not self.open:
            return
        try:
            self.connection.send_bytes(msgspec.json.encode(message))
        except OSError:
            self.open = False

    def hand(self, handle: int) -> None:
        """Give the other end an open file; it must `take` it next."""
        with suppress(OSError):  # it is gone, as will be heard
            reduction.send_handle(self.connection, handle, 0)

    def take(self) -> int:
        return reduction.recv_handle(self.connection)

    def hear(self) -> dict[str, Any] | None:
        """The next message; None when the other end is gone."""
        try:
            return msgspec.json.decode(self.connection.recv_bytes(), type=dict[str, Any])
        except (EOFError, OSError):
            self.open = False
            return None
