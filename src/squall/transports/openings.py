"""The connections that a process has under way: those that it makes, and those of who calls."""

from __future__ import annotations

import select
import socket
import ssl
from contextlib import suppress
from typing import TypeVar

from squall.transports.opening import Opening

W = TypeVar("W")


class Openings(dict[int, tuple[Opening, W | None]]):
    """By descriptor, each with whom it calls; None: that one calls. An epoll watches them."""

    def __init__(
        self, epoll: select.epoll, contexts: tuple[ssl.SSLContext, ssl.SSLContext], plaintext: bool
    ) -> None:  # fmt: skip
        super().__init__()
        self._epoll = epoll
        self._client, self._server = contexts
        self._plaintext = plaintext

    def dial(self, address: tuple[str, int], whom: W, now: float) -> None:
        """Raises `OSError` where it is known at once that this cannot be reached."""
        self._watch(Opening.dial(address, self._client, now, plaintext=self._plaintext), whom)

    def answer(self, raw: socket.socket, now: float) -> None:
        with suppress(OSError):  # whoever called has hung up
            self._watch(Opening(raw, self._server, now, server=True, plaintext=self._plaintext), None)

    def go(self, descriptor: int) -> bool:
        """True when the connection is open. Raises `Broken`."""
        opening, _ = self[descriptor]
        if opening.go():
            return True
        self._epoll.modify(descriptor, opening.waits_for)
        return False

    def drop(self, descriptor: int) -> None:
        opening, _ = self.pop(descriptor)
        self._epoll.unregister(descriptor)
        opening.close()

    def _watch(self, opening: Opening, whom: W | None) -> None:
        self[opening.fileno()] = opening, whom
        self._epoll.register(opening.fileno(), opening.waits_for)
