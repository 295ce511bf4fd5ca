"""How the members of a group come to have connections to each other: each calls those before it, others call it.

A name is believed where its process was placed, as on every connection between machines. Whoever calls says to which
meeting: a call that was for an earlier one, which has failed, may still wait to be answered.
"""

from __future__ import annotations

import math
import os
import select
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from squall.protocol.nodes import Node
from squall.transports.certificates import machine_name
from squall.transports.mesh import MeshBroken
from squall.transports.opening import Door
from squall.transports.openings import Openings
from squall.transports.stream import Broken

NUMBER_BYTES = 8  # of a meeting, behind the handshake
CALLERS_AT_MOST = 256  # that are being answered
CALL_FOR_S = 2.0  # a guest that cannot be called; who is dead has the meeting cut sooner
CALL_AGAIN_S = 0.1


class Guest(NamedTuple):
    """Who is to come, from which machine, and where it listens."""

    node: Node
    machine: int
    address: tuple[str, int]


class Way(NamedTuple):
    """How this process calls others, and is called; it keeps the listening socket for as long as it lives."""

    contexts: tuple[ssl.SSLContext, ssl.SSLContext]
    listener: socket.socket
    plaintext: bool = False


class Meeting:
    """Of `guests`, all of whom name the same ones in the same order and the same `number`."""

    def __init__(self, way: Way, number: int, guests: Sequence[Guest], own: int) -> None:
        """`own` is this process's place among them."""
        self._number = number.to_bytes(NUMBER_BYTES)
        self._guests, self._own = guests, own
        self._cancelled = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._cancelled, select.EPOLLIN)
        self._door = Door(way.listener, self._epoll)
        self._opening: Openings[int] = Openings(self._epoll, way.contexts, way.plaintext)
        self._asked: dict[int, tuple[socket.socket, int]] = {}  # by descriptor: callers that have not said their number
        self._open: dict[int, socket.socket] = {}
        self._call_at = dict.fromkeys(range(own), -math.inf)  # whom it has still to call, and when
        self._call_until = math.inf

    def cut(self) -> None:
        """From another thread: end the waiting."""
        os.eventfd_write(self._cancelled, 1)

    def run(self, within_s: float) -> dict[int, socket.socket]:
        """Connections to all others, by their places; they do not block.

        Raises `MeshBroken` where one does not come in time or cannot be called, or when it is cancelled.
        """
        now = time.monotonic()
        until, self._call_until = now + within_s, now + min(within_s, CALL_FOR_S)
        while len(self._open) < len(self._guests) - 1:
            now = time.monotonic()
            if now >= until:
                raise MeshBroken(f"{self._missing()} did not come within {within_s:g} s")
            for place in [place for place, at in self._call_at.items() if now >= at]:
                self._call(place, now)
            self._door.wake(now)
            for descriptor, _ in self._epoll.poll(min(until, self._door.wake_at, *self._call_at.values()) - now):
                self._attend(descriptor, now)
            for descriptor in [d for d, (each, whom) in self._opening.items() if whom is None and now >= each.until]:
                self._opening.drop(descriptor)
        found, self._open = self._open, {}
        return found

    def close(self) -> None:
        """What has not come to a connection that `run` has returned is given up."""
        for opening, _ in self._opening.values():
            opening.close()
        for connection in (*(asked for asked, _ in self._asked.values()), *self._open.values()):
            connection.close()
        self._epoll.close()
        os.close(self._cancelled)

    def _missing(self) -> str:
        others = (place for place in range(len(self._guests)) if place != self._own and place not in self._open)
        return ", ".join(str(self._guests[place].node) for place in others)

    def _call(self, place: int, now: float) -> None:
        del self._call_at[place]
        try:
            self._opening.dial(self._guests[place].address, place, now)
        except (OSError, ValueError, OverflowError) as error:  # also for what is no host or port
            self._call_again(place, error, now)

    def _call_again(self, place: int, error: Exception, now: float) -> None:
        """The link may come back. Raises `MeshBroken` when it has had time for that."""
        if now >= self._call_until:
            raise MeshBroken(f"{self._guests[place].node} cannot be called: {error}") from error
        self._call_at[place] = now + CALL_AGAIN_S

    def _attend(self, descriptor: int, now: float) -> None:
        if descriptor == self._cancelled:
            raise MeshBroken("the group was given up while it formed")
        if descriptor in self._opening:
            self._go_on(descriptor, now)
        elif descriptor in self._asked:
            self._read(descriptor)
        elif (raw := self._door.accept(now)) is not None:
            callers = [caller for caller, (_, whom) in self._opening.items() if whom is None]
            if len(callers) >= CALLERS_AT_MOST + len(self._guests):
                self._opening.drop(callers[0])  # the oldest: whoever is to come says soon who it is
            self._opening.answer(raw, now)

    def _go_on(self, descriptor: int, now: float) -> None:
        opening, whom = self._opening[descriptor]
        try:
            if not self._opening.go(descriptor):
                return
            connection, node, authority = opening.opened()
            place = self._place(node, authority, whom)
        except Broken as error:
            self._opening.drop(descriptor)
            if whom is not None:
                self._call_again(whom, error, now)
            return
        del self._opening[descriptor]
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)  # a member that is late reads nothing
        self._epoll.modify(descriptor, select.EPOLLIN)
        if whom is None:
            for earlier in [asked for asked, (_, of) in self._asked.items() if of == place]:
                self._hang_up(earlier)
            self._asked[descriptor] = connection, place
            self._read(descriptor)
            return
        with suppress(OSError):  # it has hung up, which is seen by whoever uses the connection
            connection.send(self._number)
        self._keep(descriptor, connection, place)

    def _place(self, node: Node, authority: str, whom: int | None) -> int:
        """Raises `Broken` for somebody else than a guest who is to call, or who was called."""
        places = range(self._own + 1, len(self._guests)) if whom is None else (whom,)
        for place in places:
            guest = self._guests[place]
            if guest.node == node and authority == machine_name(guest.machine):
                return place
        raise Broken(f"{node} of {authority} is not who is to come")

    def _read(self, descriptor: int) -> None:
        connection, place = self._asked[descriptor]
        try:
            said = connection.recv(NUMBER_BYTES)  # so few come whole, or are not ours
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError:
            said = b""
        if said == self._number and place not in self._open:
            del self._asked[descriptor]
            self._keep(descriptor, connection, place)
        else:
            self._hang_up(descriptor)

    def _hang_up(self, descriptor: int) -> None:
        connection, _ = self._asked.pop(descriptor)
        self._epoll.unregister(descriptor)
        connection.close()

    def _keep(self, descriptor: int, connection: socket.socket, place: int) -> None:
        self._epoll.unregister(descriptor)
        self._open[place] = connection
