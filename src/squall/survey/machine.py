"""What a machine does that is looked at: it answers the head, one question after the other, until that has enough."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack
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
from squall.sim.cluster.forks import ForkedWork, answer, forked
from squall.sim.cluster.jitter import Trace
from squall.sim.cluster.measure import measure
from squall.survey.links import Ends
from squall.survey.messages import MACHINE, Answer, Called, Listens, Looked, Measured, understood
from squall.transports.certificates import Identity
from squall.usercode.blame import encode, failure
from squall.usercode.sources import Sources, show


def serve(head: ControlPipe, message: dict[str, Any], member: Member | None) -> None:
    """Until the head says no more. `member`: None on the head's machine. No thread is started."""
    sources: Sources | None = message.get("sources")
    if sources is not None:
        show(sources.shipped)
    orders, ends = Orders(head, member), None
    with ExitStack() as attending:
        while (said := orders.hear()) is not None:
            found: Answer | None = None
            match said["kind"]:
                case "look":
                    found = Looked(hello(""), checkup())
                case "listen":
                    ends, listener = _ends(said, message["plaintext"], member)
                    attending.enter_context(forked([partial(ends.attend, listener)]))
                    found = Listens(listener.getsockname()[1], time.time())
                case "call" if ends is not None:
                    host = said["host"] or (member.head if member is not None else "localhost")
                    found = _called(ends, said, host)
                case "measure":
                    others = [head.connection, *([member.attendant.connection] if member is not None else [])]
                    found = _in_a_process(partial(_measure, message, said["cores"], said["seconds"]), others)
                case _:
                    return
            if found is not None:
                head.send(msgspec.json.encode(found))


def _ends(said: dict[str, Any], plaintext: bool, member: Member | None) -> tuple[Ends, socket.socket]:
    """Of this machine's links, and where it listens as a shard of a run does."""
    machine = member.machine if member is not None else 0
    (listener,) = listeners_of({("shard", machine): machine}, machine).values()
    identity = member.identity if member is not None else msgspec.convert(said["identity"], Identity)
    return Ends(machine, identity, plaintext), listener


def _called(ends: Ends, said: dict[str, Any], host: str) -> Called:
    try:
        return ends.call(said["machine"], (looked_up(host), said["port"]), said["seconds"])
    except SquallError as error:
        return Called(why=str(error))


def _in_a_process(work: ForkedWork, others: list[Any]) -> Answer | None:
    """What the work says; None when one of the `others` has something to say before, and nobody may wait any more."""
    with forked([work]) as (line,):
        while line.connection not in (ready := wait([line.connection, *others])):
            if any(other in ready and other.poll() for other in others):  # else it is about what goes out
                return None
        return understood(answer(line))


def _measure(message: dict[str, Any], cores: int, seconds: float, line: ControlPipe) -> None:
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
    line.send(msgspec.json.encode(Measured(**machine, times=jitter.times, others=found.others)))
