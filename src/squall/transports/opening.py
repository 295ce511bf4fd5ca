"""A connection between two machines that is being opened: it is made, encrypted, and each end proves its name.

Nothing that a stranger sends is read as anything but TLS, and a stranger costs a socket for `OPEN_WITHIN_S`. Where the
network is encrypted already, TLS may end when both names are proved: what follows is plain TCP, on the same connection.
"""

from __future__ import annotations

import errno
import math
import select
import socket
import ssl
import sys

from squall.protocol.nodes import Node
from squall.transports.certificates import names_of
from squall.transports.stream import Broken

OPEN_WITHIN_S = 10.0
UNANSWERED_MS = 10_000  # a connection whose peer's machine does not confirm what was sent is given up
PROBE_EVERY_S = 3  # where nobody speaks
UNSENT_BYTES = 1 << 18  # that the kernel takes; what it has cannot wait for its turn (`transports.lanes`)
REST_S = 1.0  # that a process without room for another connection does not look who calls
BACKLOG = 1024  # processes that may call a listener at once
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def notice_loss(connection: socket.socket) -> None:
    """Have the kernel send at once, and end the connection when the peer's machine is gone, though nobody speaks."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_USER_TIMEOUT, UNANSWERED_MS),
        (socket.TCP_KEEPIDLE, UNANSWERED_MS // 1000),
        (socket.TCP_KEEPINTVL, PROBE_EVERY_S),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def listening() -> socket.socket:
    """A socket that others call, in any version of IP that this machine has."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=BACKLOG)


class Opening:
    """One end. `go` does what goes without waiting."""

    def __init__(
        self, raw: socket.socket, context: ssl.SSLContext, now: float, *, server: bool, plaintext: bool = False
    ) -> None:
        raw.setblocking(False)
        notice_loss(raw)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self.until = now + OPEN_WITHIN_S
        self._raw: socket.socket | None = raw  # not connected yet
        self._context = context
        self._server = server
        self._plaintext = plaintext
        self._names: tuple[str, str] | None = None  # of the peer, and of who vouches for it, when they are proved
        self._connection: ssl.SSLSocket | None = None
        if server:
            self._encrypt(raw)

    @classmethod
    def dial(cls, address: tuple[str, int], context: ssl.SSLContext, now: float, *, plaintext: bool = False) -> Opening:
        """Raises `OSError` where it is known at once that this cannot be reached."""
        family, kind, protocol, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        raw = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        opening = cls(raw, context, now, server=False, plaintext=plaintext)
        raw.connect_ex(resolved)  # whether it has worked is seen when it can be written to
        return opening

    def fileno(self) -> int:
        connection = self._connection or self._raw
        assert connection is not None
        return connection.fileno()

    @property
    def waits_for(self) -> int:
        """What of the descriptor it waits for: `select.EPOLLIN` or `select.EPOLLOUT`."""
        return select.EPOLLOUT if self._connection is None else self._wants

    def go(self) -> bool:
        """True when the connection is open. Raises `Broken`."""
        try:
            if self._connection is None:
                assert self._raw is not None
                error = self._raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, "not connected")
                self._encrypt(self._raw)
            assert self._connection is not None
            if self._names is None:
                self._connection.do_handshake()
                self._names = names_of(self._connection)
            if self._plaintext:
                self._connection.unwrap()  # each end says that it ends TLS, and OpenSSL reads nothing behind that
        except ssl.SSLWantReadError:
            self._wants = select.EPOLLIN
            return False
        except ssl.SSLWantWriteError:
            self._wants = select.EPOLLOUT
            return False
        except (OSError, ValueError) as error:
            raise Broken(str(error)) from error
        return True

    @property
    def connection(self) -> ssl.SSLSocket:
        """That is open."""
        assert self._connection is not None
        return self._connection

    def opened(self) -> tuple[socket.socket, Node, str]:
        """The connection, who is at its other end, and who vouches for that.

        Raises `Broken` for a name that no process has.
        """
        assert self._names is not None
        name, authority = self._names
        try:
            node = Node.parse(name)
        except ValueError as error:
            raise Broken("a certificate without a process's name") from error
        if str(node) != name:
            raise Broken(f"{name} is not how {node} is written")
        if not self._plaintext:
            return self.connection, node, authority
        plain = socket.socket(fileno=self.connection.detach())
        plain.setblocking(False)
        return plain, node, authority

    def detach(self) -> int:
        """Its descriptor, which is the caller's from now on."""
        connection = self._connection or self._raw
        assert connection is not None
        return connection.detach()

    def close(self) -> None:
        for connection in (self._connection, self._raw):
            if connection is not None:
                connection.close()

    def _encrypt(self, raw: socket.socket) -> None:
        self._wants = select.EPOLLIN
        self._connection = self._context.wrap_socket(raw, server_side=self._server, do_handshake_on_connect=False)
        self._raw = None


class Door:
    """A socket that listens, watched by an epoll. While no more files may be opened it rests, which it says once."""

    def __init__(self, listening: socket.socket, epoll: select.epoll) -> None:
        listening.setblocking(False)
        self.wake_at = math.inf  # when it looks again who calls
        self._listening = listening
        self._epoll = epoll
        self._told = False
        epoll.register(listening, select.EPOLLIN)

    def fileno(self) -> int:
        return self._listening.fileno()

    def accept(self, now: float) -> socket.socket | None:
        """Who calls; None: nobody any more, or there is no room."""
        try:
            return self._listening.accept()[0]
        except OSError as error:
            if error.errno in NO_ROOM:
                self.wake_at = now + REST_S
                self._epoll.modify(self._listening, 0)
                self._tell(error)
            return None

    def wake(self, now: float) -> None:
        if now >= self.wake_at:
            self.wake_at = math.inf
            self._epoll.modify(self._listening, select.EPOLLIN)

    def detach(self) -> int:
        """Its descriptor, which is the caller's from now on."""
        return self._listening.detach()

    def close(self) -> None:
        self._listening.close()

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            why = f"who calls has to wait ({error.strerror}): raise the limit of open files (ulimit -n)"
            sys.stderr.write(f"squall: warning: {why}\n")
