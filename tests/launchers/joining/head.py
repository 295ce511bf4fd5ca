"""A head that admits whoever has the token, in a thread of the test, and connections of those who have not."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from squall.launchers.joining.address import bound
from squall.launchers.joining.listener import JoinedMachine, Listener
from squall.launchers.joining.tls_pipe import TlsPipe
from squall.launchers.joining.token import Token
from squall.transports.certificates import Identity, call_reception, fingerprint

SOON_S = 10.0
ROOT = Identity.new_root("a run")


class Head:
    def __init__(self, port: int = 0, root: Identity | None = None, token: Token | None = None) -> None:
        self.root = root or Identity.new_root("a run")
        self.token = token or Token.new(self.root)
        self.listener = Listener(bound(("127.0.0.1", port)), self.root, self.token)
        self.address = self.listener.address
        self.joined: list[JoinedMachine] = []

    def turn(self, timeout_s: float = 0.01) -> None:
        select.select([self.listener], [], [], timeout_s)
        self.joined += self.listener.turn(time.monotonic())

    def until(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + SOON_S
        while not done():
            assert time.monotonic() < deadline
            self.turn()

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Meanwhile it takes its turns."""
        over = threading.Event()

        def attend() -> None:
            while not over.is_set():
                self.turn()

        thread = threading.Thread(target=attend)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        self.listener.close()
        for machine in self.joined:
            machine.pipe.close()


def tls_pair(limit: int) -> tuple[TlsPipe, ssl.SSLSocket]:
    """A pipe that takes messages up to a length, and the connection at whose other end anything can be sent."""
    with bound(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname(), SOON_S)
        mine, _ = listening.accept()
    mine.settimeout(SOON_S)
    server = ROOT.reception().wrap_socket(mine, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.do_handshake)
    thread.start()
    client = call_reception(theirs, fingerprint(ROOT.root))
    thread.join()
    return TlsPipe(server, limit), client
