"""The head's side of joining: who calls is led from a stranger to a machine of the run, or sent away.

A stranger costs a socket for a few seconds. Nothing that it sends is read as anything but TLS, and then as the secret,
until that was right.
"""

from __future__ import annotations

import hmac
import select
import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from squall.launchers.joining.address import Address
from squall.launchers.joining.hello import HELLO_BYTES, Answer, Hello, Refusal, Welcome, hello, why_not
from squall.launchers.joining.tls_pipe import TlsPipe
from squall.launchers.joining.token import SECRET_LENGTH, Token
from squall.transports.certificates import Identity, machine_name
from squall.transports.opening import Door, Opening
from squall.transports.stream import Broken
from squall.transports.texts import printable

STRANGERS_AT_MOST = 64  # at a time; the one that came first goes when there are more
WRONG_AFTER_S = 1.0  # seconds until a wrong secret is answered
MEMBER_BYTES = 1 << 22  # of a message that a machine may send


@dataclass(frozen=True)
class JoinedMachine:
    """A machine that belongs to the run from now on."""

    number: int
    hello: Hello
    identity: Identity  # the authority over its processes, which it has as well
    pipe: TlsPipe


class Stranger:
    """A call that is not finished."""

    def __init__(self, opening: Opening) -> None:
        self.until = opening.until  # when it is sent away
        self.wrong = False  # its secret was, and it waits for the answer
        self._opening = opening
        self.pipe: TlsPipe | None = None  # when the connection is encrypted
        self._trusted = False  # the secret was right

    def fileno(self) -> int:
        return (self.pipe or self._opening).fileno()

    @property
    def waits_for(self) -> int:
        return select.EPOLLIN if self.pipe else self._opening.waits_for

    def go(self, secret: str, now: float) -> Hello | None:
        """Do what goes without waiting; its hello when that is here. Raises `Broken`."""
        try:
            if self.pipe is None:
                if not self._opening.go():
                    return None
                self.pipe = TlsPipe(self._opening.connection, SECRET_LENGTH)
            while self.pipe.poll():
                message = self.pipe.recv_bytes()
                if self._trusted:
                    said: Hello = printable(msgspec.json.decode(message, type=Hello), kept="")
                    return said
                if not hmac.compare_digest(message, secret.encode()):
                    self.wrong, self.until = True, now + WRONG_AFTER_S
                    return None
                self._trusted, self.pipe.limit = True, HELLO_BYTES
        except (EOFError, OSError, ValueError, RecursionError) as error:
            raise Broken(str(error)) from error
        return None

    def answer(self, answer: Answer) -> None:
        assert self.pipe is not None
        with suppress(OSError):
            self.pipe.send_bytes(msgspec.json.encode(answer))

    def close(self) -> None:
        (self.pipe or self._opening).close()


class Listener:
    """For a process that waits for several things: `fileno` is readable when `turn` has something to do."""

    def __init__(self, listening: socket.socket, root: Identity, token: Token, number: int = 1) -> None:
        """`number`: the first that is given."""
        host, port = listening.getsockname()[:2]
        self.address: Address = (host, port)
        self.refused: deque[str] = deque(maxlen=100)  # for the user: machines with the token that cannot take part
        self._root = root
        self._token = token
        self._context = root.reception()
        self._given = set(range(number))  # numbers that machines have, or had
        self._strangers: dict[int, Stranger] = {}  # by descriptor, in the order in which they came
        self._epoll = select.epoll()
        self._door = Door(listening, self._epoll)

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def wake_at(self) -> float | None:
        """When there is something to do though nobody speaks."""
        return min((stranger.until for stranger in self._strangers.values()), default=None)

    def turn(self, now: float) -> list[JoinedMachine]:
        """Do what goes without waiting. `now` is in seconds, and only moves forwards."""
        joined: list[JoinedMachine] = []
        self._door.wake(now)
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._door.fileno():
                self._accept(now)
            elif descriptor in self._strangers:
                self._go_on(descriptor, now, joined)
        for descriptor in [d for d, stranger in self._strangers.items() if now >= stranger.until]:
            stranger = self._strangers[descriptor]
            if stranger.wrong:
                stranger.answer(Refusal("the token is wrong: copy the file that the run's first machine has written"))
            self._send_away(descriptor)
        return joined

    def close(self) -> None:
        """Machines that have joined keep their connections."""
        for descriptor in list(self._strangers):
            self._send_away(descriptor)
        self._door.close()
        self._epoll.close()

    def _accept(self, now: float) -> None:
        raw = self._door.accept(now)
        if raw is None:
            return
        with suppress(OSError):  # whoever called has hung up
            if len(self._strangers) >= STRANGERS_AT_MOST:
                self._send_away(next(iter(self._strangers)))
            self._watch(Stranger(Opening(raw, self._context, now, server=True)))

    def _watch(self, stranger: Stranger) -> None:
        self._strangers[stranger.fileno()] = stranger
        self._epoll.register(stranger, stranger.waits_for)

    def _go_on(self, descriptor: int, now: float, joined: list[JoinedMachine]) -> None:
        stranger = self._strangers[descriptor]
        try:
            said = stranger.go(self._token.secret, now)
        except Broken:
            self._send_away(descriptor)
            return
        if said is not None:
            self._judge(descriptor, said, joined)
        elif stranger.wrong:
            self._epoll.modify(descriptor, 0)
        elif stranger.fileno() != descriptor:  # it is encrypted now
            self._epoll.unregister(descriptor)
            del self._strangers[descriptor]
            self._watch(stranger)
        else:
            self._epoll.modify(descriptor, stranger.waits_for)

    def _judge(self, descriptor: int, said: Hello, joined: list[JoinedMachine]) -> None:
        stranger = self._strangers[descriptor]
        why = why_not(said, hello(self.address[0]))
        if why:
            self.refused.append(why)
            stranger.answer(Refusal(why))
            self._send_away(descriptor)
            return
        number = said.number or 1
        if number in self._given:
            number = max(self._given) + 1
        self._given.add(number)
        identity = self._root.issue(machine_name(number), authority=True)
        stranger.answer(Welcome(number, identity))
        self._epoll.unregister(descriptor)
        del self._strangers[descriptor]
        assert stranger.pipe is not None
        stranger.pipe.limit = MEMBER_BYTES
        joined.append(JoinedMachine(number, said, identity, stranger.pipe))

    def _send_away(self, descriptor: int) -> None:
        stranger = self._strangers.pop(descriptor)
        self._epoll.unregister(descriptor)
        stranger.close()
