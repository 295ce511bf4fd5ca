"""Numbers between processes that all have a connection to each other: what each sends arrives in its order.

A thread carries them while the process computes. Nothing is kept on its way: the receiver says into which memory before
it reads, so one that is late lets its peers wait, and no peer can fill its memory.
"""

from __future__ import annotations

import os
import select
import ssl
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from socket import SHUT_RDWR, socket

from squall.transports.forks import abandon_at_fork

PASS_BYTES = 1 << 20  # what a turn reads or writes at most, so that no connection keeps the others waiting
CUT = "the connections were cut"


class MeshBroken(RuntimeError):
    """Numbers do not arrive any more."""


class Transfer:
    """Numbers on their way, from or into this memory."""

    __slots__ = ("done", "left")

    def __init__(self, view: memoryview) -> None:
        self.left = view
        self.done = not view.nbytes


Steps = Generator[Transfer, None, None]  # each transfer has to be over before it goes on
Over = Callable[[Exception | None], None]  # with what went wrong, if something did


@dataclass
class _Task:
    steps: Steps
    over: Over
    alone: bool  # no other begins before it is over
    waits_for: Transfer | None = None

    def go_on(self) -> bool:
        """Take the steps that can be taken; True when all are over."""
        self.waits_for = next((transfer for transfer in self.steps if not transfer.done), None)
        return self.waits_for is None


class _Line:
    """The connection to one peer."""

    def __init__(self, connection: socket, name: str) -> None:
        self.connection = connection
        self.name = name
        self.outgoing: deque[Transfer] = deque()
        self.incoming: deque[Transfer] = deque()
        self.readable = self.writable = True  # as far as is known
        self.watched = 0  # what of it wakes the thread

    def write(self) -> bool:
        """Whether there is more that goes at once. Raises `MeshBroken`."""
        if not (self.outgoing and self.writable):
            return False
        transfer = self.outgoing[0]
        try:
            transfer.left = transfer.left[self.connection.send(transfer.left[:PASS_BYTES]) :]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            self.writable = False
            return False
        except OSError as error:
            raise MeshBroken(f"the connection to {self.name} has ended: {error}") from error
        if not transfer.left.nbytes:
            transfer.done = True
            self.outgoing.popleft()
        return True

    def read(self) -> bool:
        """Whether there may be more at once. Raises `MeshBroken`."""
        budget = PASS_BYTES
        while self.incoming and self.readable and budget > 0:
            transfer = self.incoming[0]
            try:
                count = self.connection.recv_into(transfer.left)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self.readable = False
                return False
            except OSError as error:
                raise MeshBroken(f"the connection to {self.name} has ended: {error}") from error
            if not count:
                raise MeshBroken(f"{self.name} has ended its connection")
            budget -= count
            transfer.left = transfer.left[count:]
            if not transfer.left.nbytes:
                transfer.done = True
                self.incoming.popleft()
                return True
        return budget <= 0

    @property
    def waits_for(self) -> int:
        """Who reads nothing now still wants to know that the peer is gone."""
        reads = self.incoming and not self.readable
        writes = self.outgoing and not self.writable
        return select.EPOLLRDHUP | (select.EPOLLIN if reads else 0) | (select.EPOLLOUT if writes else 0)


class Mesh:
    """The connections of one process, by the places of its peers. They are its own, and do not block."""

    def __init__(self, connections: Mapping[int, socket], names: Sequence[str], news: int | None = None) -> None:
        """`names` are those of all places, for people. `news`: an eventfd that is written to when it has failed."""
        self._lines = {peer: _Line(connection, names[peer]) for peer, connection in connections.items()}
        self._peers = {connection.fileno(): peer for peer, connection in connections.items()}
        self._asked: deque[_Task] = deque()
        self._under_way: list[_Task] = []
        self._news = news
        self._why = ""  # it has failed
        self._lock = threading.Lock()  # of what is asked for, and of whether it has failed
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        for line in self._lines.values():
            self._epoll.register(line.connection, 0)
        self._thread = threading.Thread(target=self._run, name="squall mesh", daemon=True)
        self._thread.start()
        abandon_at_fork(self)

    # ------------------------------------------------------------ what the process asks for

    def do(self, steps: Steps, over: Over, *, alone: bool) -> None:
        """Have these steps taken behind all that were asked for before; then the thread calls `over`.

        Steps that are `alone` keep later ones from beginning until they are over. Any two peers must ask for what they
        have with each other in the same order.
        """
        with self._lock:
            if not self._why:
                self._asked.append(_Task(steps, over, alone))
                os.eventfd_write(self._wake, 1)
                return
        over(MeshBroken(self._why))

    def cut(self, why: str = CUT) -> None:
        """All that is under way fails, here and at the peers, and so does what is asked for later."""
        with self._lock:
            if not self._why:
                self._why = why
                os.eventfd_write(self._wake, 1)  # the thread alone touches connections

    def close(self) -> None:
        self.cut()
        self._thread.join()

    def abandon(self) -> None:
        for line in self._lines.values():
            with suppress(OSError):
                os.close(line.connection.detach())
        self._epoll.close()

    # ------------------------------------------------------------ for steps, which the thread takes

    def send(self, to: int, view: memoryview) -> Transfer:
        """The memory must stay as it is until the transfer is done."""
        transfer = Transfer(view)
        if not transfer.done:
            self._lines[to].outgoing.append(transfer)
        return transfer

    def receive(self, source: int, view: memoryview) -> Transfer:
        transfer = Transfer(view)
        if not transfer.done:
            self._lines[source].incoming.append(transfer)
        return transfer

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._why:
                more = self._go_on()
                for line in self._lines.values():
                    more |= line.write() | line.read()
                self._wait(0.0 if more else None)
        except MeshBroken as broken:
            self.cut(str(broken))
        except Exception as error:  # of a task's steps: nobody must be left waiting
            self.cut(f"{type(error).__name__}: {error}")
        self._end()

    def _go_on(self) -> bool:
        """Take what steps can be taken; whether there were any."""
        went = False
        for task in [task for task in self._under_way if task.waits_for is not None and task.waits_for.done]:
            self._advance(task)
            went = True
        while self._asked and not any(task.alone for task in self._under_way):
            task = self._asked.popleft()
            self._under_way.append(task)
            self._advance(task)
            went = True
        return went

    def _advance(self, task: _Task) -> None:
        if task.go_on():
            self._under_way.remove(task)
            task.over(None)

    def _wait(self, timeout_s: float | None) -> None:
        for line in self._lines.values():
            if line.watched != line.waits_for:
                line.watched = line.waits_for
                self._epoll.modify(line.connection, line.watched)
        for descriptor, found in self._epoll.poll(timeout_s):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
                continue
            line, ended = self._lines[self._peers[descriptor]], found & ~(select.EPOLLIN | select.EPOLLOUT)
            line.readable |= bool(found & select.EPOLLIN or ended)
            line.writable |= bool(found & select.EPOLLOUT or ended)
            idle = timeout_s is None and not (line.incoming or line.outgoing)
            if ended and idle:  # else what it has sent is read first, and whoever has all of it goes on
                self.cut(f"{line.name} has ended its connection")

    def _end(self) -> None:
        """It has failed: let go of everything, and tell those who wait."""
        for line in self._lines.values():
            with suppress(OSError):
                line.connection.shutdown(SHUT_RDWR)  # also where a process that was forked holds it open
            line.connection.close()
        self._epoll.close()
        with self._lock:
            tasks, self._under_way = [*self._under_way, *self._asked], []
            self._asked.clear()
        os.close(self._wake)
        for task in tasks:
            task.over(MeshBroken(self._why))
        if self._news is not None:
            os.eventfd_write(self._news, 1)
