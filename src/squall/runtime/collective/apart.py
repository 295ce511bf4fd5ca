"""A member of a group over several machines: what it waits for others in is done by a thread.

A machine that is cut off breaks no connection. So its process has to hear meanwhile, of a view without that machine,
that nobody waits any more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from torch import Tensor

from squall.protocol.effects import Gather, JoinGroup, Step
from squall.protocol.events import Event
from squall.runtime.collective.meeting import FarFellows
from squall.runtime.collective.process import GroupedMember


class Apart:
    """All methods are for the process's own thread."""

    def __init__(self, grouped: GroupedMember, fellows: FarFellows) -> None:
        self.member, self.holding = grouped.member, grouped.holding
        self._grouped = grouped
        self._fellows = fellows
        self._asked: SimpleQueue[Callable[[], Event | None]] = SimpleQueue()
        self._answers: SimpleQueue[Event | BaseException | None] = SimpleQueue()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # there is an answer
        self._busy = False
        threading.Thread(target=self._run, name="squall member", daemon=True).start()

    @property
    def wakes(self) -> Sequence[int]:
        return (self._news,)

    def join(self, effect: JoinGroup) -> None:
        self._fellows.opens()
        self._do(partial(self._grouped.join, effect))

    def step(self, effect: Step) -> None:
        self._do(partial(self._grouped.step, effect))

    def gather(self, effect: Gather) -> None:
        self._do(partial(self._grouped.gather, effect))

    def state(self) -> dict[str, Tensor]:
        return self._grouped.state()

    def cut(self) -> None:
        self._fellows.cut()

    def leave(self) -> None:
        """Nothing is under way, or all is over."""
        if not self._busy:
            self._grouped.leave()

    def poll(self) -> Event | None:
        """The answer to what was begun. Raises what the user's code has raised there."""
        if self._answers.empty():
            return None
        os.eventfd_read(self._news)
        self._busy = False
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def rest(self) -> None:
        if not self._busy:
            self._grouped.rest()

    def _do(self, work: Callable[[], Event | None]) -> None:
        self._busy = True
        self._asked.put(work)

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
