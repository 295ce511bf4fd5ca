"""A member of a group whose process has to hear meanwhile: what it waits for others in is done by a thread.

A machine that is cut off breaks no connection, nor does a script whose loop is somewhere else. Of a view without that
machine, or of a stop, the process learns that nobody waits any more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from squall.protocol.effects import CutGroup, Effect, End, Gather, JoinGroup, Payload, Step
from squall.protocol.events import Event
from squall.runtime.driver import Host, HostAround


class Apart(HostAround):
    """Around a member's host, also of one with several parts. All methods are for the process's own thread."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._asked: SimpleQueue[Callable[[], Event | None]] = SimpleQueue()
        self._answers: SimpleQueue[Event | BaseException | None] = SimpleQueue()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)  # how many answers there are
        self._under_way = 0
        threading.Thread(target=self._run, name="squall member", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Something is under way, or its answer is not taken."""
        return self._under_way > 0

    @property
    def wakes(self) -> Sequence[int]:
        return (self._news, *self._host.wakes)

    def perform(self, effect: Effect, now: float) -> Event | None:
        """What comes while something is under way comes behind it, but for its end."""
        waits = isinstance(effect, JoinGroup | Step | Gather)
        if isinstance(effect, CutGroup) or not (waits or self._under_way):
            return super().perform(effect, now)
        if not isinstance(effect, End):  # the process ends
            self._under_way += 1
            self._asked.put(partial(self._host.perform, effect, now))
        return None

    def attach(self, payload: Payload) -> None:
        """Behind what is under way, which waits for nobody elsewhere: no machine shows weights that may move.

        In a replica of several parts both are words with the others, which one thread at a time may have.
        """
        if self._under_way:
            over = threading.Event()
            self._under_way += 1
            self._asked.put(over.set)
            over.wait()
        super().attach(payload)

    def poll(self) -> Event | None:
        """The answer to what was begun. Raises what the user's code has raised there."""
        if self._answers.empty():
            return super().poll()
        os.eventfd_read(self._news)
        self._under_way -= 1
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def finish(self) -> None:
        """Wait for what is under way; its answers are not wanted."""
        while self._under_way:
            self._answers.get()
            self._under_way -= 1

    def rest(self) -> None:
        if not self._under_way:
            super().rest()

    def _run(self) -> None:
        while True:
            work = self._asked.get()
            answer: Event | BaseException | None
            try:
                answer = work()
            except BaseException as error:
                answer = error
            os.eventfd_write(self._news, 1)  # before the answer is there, which is read together with this
            self._answers.put(answer)
