"""A replica of a replay in a process of its own, forked from this one: what it is to perform goes to it over a pipe."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import traceback
from abc import abstractmethod
from collections.abc import Iterable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple, Protocol

import cloudpickle

from squall.protocol.effects import Compute, Effect, End
from squall.protocol.events import Event
from squall.protocol.nodes import Node
from squall.replaying.nonfinite import NonFiniteBatch
from squall.runtime.driver import Host
from squall.runtime.job import Job
from squall.runtime.processes import fork


class Strayed(Exception):
    """A replica's process does not do again what it did in its run. The message names it, and says what it did."""


class Failed(NamedTuple):
    """What a replica's process says instead of an answer, before it ends."""

    why: str


class ReplicaProcess(Host):
    """A replica's host in the replay: what it is to perform, its process performs."""

    def __init__(self, node: Node, pid: int, pipe: Connection) -> None:
        self.node = node
        self._pid = pid
        self._handle = os.pidfd_open(pid)  # readable when the process has ended, whoever else holds its pipe
        self._pipe = pipe

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, End):
            self.close()
            return None
        event: Event | None = self.ask(effect)
        return event

    @abstractmethod
    def examine(self, effect: Compute) -> NonFiniteBatch:
        """Compute a batch under observation. Nothing else is done any more."""

    def abandon(self) -> None:
        """In a process that was forked later: it is not the one to close this."""
        if not self._pipe.closed:
            self._pipe.close()
            os.close(self._handle)

    def close(self) -> None:
        """The process does no more, nor does any that it has started. May be called again."""
        if self._pipe.closed:
            return
        self.abandon()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def ask(self, order: object) -> Any:
        self.order(order)
        return self.answer()

    def order(self, order: object) -> None:
        """What comes of it `answer` tells, which has to be called."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, and said how
            self._pipe.send_bytes(pickle.dumps(order))

    def answer(self) -> Any:
        """Raises `Strayed`."""
        wait([self._pipe, self._handle])
        try:
            if not self._pipe.poll():
                raise EOFError
            answer = cloudpickle.loads(self._pipe.recv_bytes())  # from a process that this one has forked
        except (EOFError, ConnectionResetError):
            self.close()
            raise Strayed(f"the process of {self.node} was lost") from None
        if isinstance(answer, Failed):
            self.close()
            raise Strayed(answer.why)
        return answer


class Processes(Protocol):
    """The replicas of a replay, in processes of their own."""

    def host(self, job: Job, node: Node) -> ReplicaProcess:
        """The replica's, forked when it is first asked for."""

    def completed(self, job: Job, node: Node) -> Job:
        """The job with what a replica's process alone knows of it."""


def forked(others: Iterable[ReplicaProcess]) -> tuple[int, Connection]:
    """As `os.fork`, with an end of a pipe on either side. The new process leads a group, and forgets the `others`."""
    mine, theirs = Pipe()
    if pid := fork():
        theirs.close()
        with contextlib.suppress(OSError):  # it has done so itself
            os.setpgid(pid, pid)
        return pid, mine
    try:
        os.setpgid(0, 0)
        mine.close()
        for host in others:
            host.abandon()
    except BaseException:  # this process never returns into the replay's own code
        traceback.print_exc()
        os._exit(1)
    return 0, theirs
