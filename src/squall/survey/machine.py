"""What a machine does that is looked at: it answers the head, one question after the other, until that has enough."""

from __future__ import annotations

import math
import os
import time
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import msgspec

from squall.doctor import checkup
from squall.errors import SquallError
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.joining.hello import hello
from squall.launchers.member_messages import Failed
from squall.launchers.orders import Member, Orders, listeners_of, looked_up
from squall.sim.cluster.forks import answer, forked
from squall.sim.cluster.jitter import Trace
from squall.sim.cluster.measure import measure
from squall.survey.links import Ends, Unreached
from squall.survey.messages import MACHINE, Answer, Called, Listens, Looked, Measured
from squall.transports.certificates import Identity
from squall.usercode.blame import encode, failure
from squall.usercode.sources import Sources, show


def serve(head: ControlPipe, message: dict[str, Any], member: Member | None) -> None:
    """Until the head says no more. `member`: None on the head's machine. No thread is started."""
    Surveyed(head, message, member).serve()


class Surveyed:
    def __init__(self, head: ControlPipe, message: dict[str, Any], member: Member | None) -> None:
        self._head = head
        self._message = message
        self._member = member
        self._orders = Orders(head, member)
        self._ends: Ends | None = None

    def serve(self) -> None:
        sources: Sources | None = self._message.get("sources")
        if sources is not None:
            show(sources.shipped)
        while self._awaited() and (said := self._orders.hear()) is not None:
            match said["kind"]:
                case "look":
                    self._say(Looked(hello(""), checkup()))
                case "listen":
                    self._listen(said)
                case "call":
                    self._say(self._call(said))
                case "measure":
                    with forked([partial(_measure, self._message, said["cores"], said["seconds"])]) as (line,):
                        if self._awaited(line):
                            self._head.say(**answer(line))
                case _:
                    break
        if self._ends is not None:
            self._ends.close()

    def _listen(self, said: dict[str, Any]) -> None:
        """As a shard of a run does."""
        machine = self._member.machine if self._member is not None else 0
        (listener,) = listeners_of({("shard", machine): machine}, machine).values()
        told = self._member.identity if self._member is not None else msgspec.convert(said["identity"], Identity)
        self._ends = Ends(machine, told, listener, self._message["plaintext"])
        self._say(Listens(listener.getsockname()[1], time.time()))

    def _call(self, said: dict[str, Any]) -> Called:
        assert self._ends is not None
        host = said["host"] or (self._member.head if self._member is not None else "localhost")
        try:
            way = self._ends.call(said["machine"], (looked_up(host), said["port"]), said["seconds"])
        except (Unreached, SquallError) as error:
            return Called(why=str(error))
        return Called("", *way)

    def _say(self, answer: Answer) -> None:
        self._head.send(msgspec.json.encode(answer))

    def _awaited(self, line: ControlPipe | None = None) -> bool:
        """Answer who calls until the line says something, or without one the head; False when all is over."""
        others = [self._head.connection, *([self._member.attendant.connection] if self._member is not None else [])]
        while True:
            sources = [*others, *([line.connection] if line is not None else []), *([self._ends] if self._ends else [])]
            wake_at = self._ends.wake_at if self._ends is not None else math.inf
            ready = wait(sources, None if wake_at == math.inf else max(0.0, wake_at - time.monotonic()))
            if self._ends is not None:
                self._ends.attend()
            if line is not None and line.connection in ready:
                return True
            if any(other in ready and (other is not self._head.connection or other.poll()) for other in others):
                return line is None


def _measure(message: dict[str, Any], cores: int, seconds: float, line: ControlPipe) -> None:
    """In a process of its own, which is ended when nobody waits for it any more."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    try:
        found = measure(
            message["task"], message["strategy"], seconds=seconds, threads=message["threads"], busy=message["busy"]
        )
    except Exception as error:
        own = not isinstance(error, SquallError) and bool(failure(error).file)
        line.send(msgspec.json.encode(Failed(encode(error) if own else str(error), own)))
        return
    jitter = found.machine.jitter
    assert isinstance(jitter, Trace)
    machine = {name: getattr(found.machine, name) for name in MACHINE}
    measured = Measured(
        **machine, times=jitter.times, batch_size=found.batch_size, elements=found.elements, others=found.others
    )
    line.send(msgspec.json.encode(measured))
