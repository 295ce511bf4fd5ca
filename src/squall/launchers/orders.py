"""What a nursery is told before its processes begin: where each process of the run is, and who listens where.

    head -> nursery      the task (a pickle), "place", "launch" with the files of a snapshot behind it, "begin"
    nursery -> head      "built" with what must be the same everywhere, "placed" with ports, "ready", or "failed";
                         "unready" where its user leaves behind that

The head is the launching process. It may place all anew until they have begun, and again when they have ended.
On a run's only machine there is "launch" alone.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from squall.errors import SquallError
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.files import take_files
from squall.protocol.effects import End
from squall.protocol.heartbeats import Pulse
from squall.protocol.nodes import Node
from squall.record.inventory import Inventory
from squall.runtime.answering import PredictionTask
from squall.runtime.placement import Seats
from squall.runtime.run_plan import Plan
from squall.runtime.site import Site
from squall.task import Task
from squall.transports.certificates import Identity
from squall.transports.opening import listening
from squall.transports.streams import Address
from squall.vector import Layout

BEATS = 4  # of a machine, in the time after which it is taken for lost
MODULES = "modules"  # folder in a member's own directory
OVER = End("finished", "the run has ended")
GONE = "the run's first machine is gone before the training"
MOVING = End("failed", f"{GONE} went on")
LEFT = End("left", "this machine has left the run, which goes on without it")
HANDED_OVER = End("left", "this machine has left the run, which goes on with its shards on others")
LISTEN = ("coordinator", "shard", "backup")  # others call them, or the shard that takes over from a backup


class Facts(msgspec.Struct, frozen=True):
    """What must be the same on every machine of a run."""

    layout: Layout
    examples: int
    evaluated: bool = True  # there is something to evaluate on
    starts: tuple[int, ...] = ()  # where stages begin: the head's own machine cuts them for all
    answers: int = 0  # the checksum of the model that answers, where nothing is trained

    @classmethod
    def of(cls, task: Task, starts: tuple[int, ...] = ()) -> Facts:
        layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
        answers = task.checksum() if isinstance(task, PredictionTask) else 0
        return cls(layout, task.examples, task.validate is not None, starts, answers)

    def differences(self, other: Facts) -> str:
        """How `other` differs, in words; "" if it does not."""
        found = self.layout.differences(other.layout)[:5]
        if self.examples != other.examples:
            found.append(f"{other.examples} examples in place of {self.examples}")
        if self.answers != other.answers:
            found.append("other weights in the model that answers")
        return "; ".join(found)


class Order(NamedTuple):
    """What to launch."""

    directory: Path  # of the run; of this machine's part of it, where the run's own is elsewhere
    snapshot: int | None
    site: Site | None = None
    starts: tuple[int, ...] | None = None  # where the stages of replicas of several parts begin; None: not known yet


class Member(NamedTuple):
    """A machine that has joined a run."""

    machine: int
    identity: Identity
    head: str  # the host that was called; who is there is reached at it
    attendant: ControlPipe  # leads to `squall join`
    own: Path  # a directory for this machine's part of the run, which is removed at its end
    host: str = ""  # where others reach this machine


class Orders:
    """What the head wants of this nursery: to launch a run, and to go on with it when others of its machines have left.

    `member` is None on the head's own machine.
    """

    def __init__(self, head: ControlPipe, member: Member | None = None) -> None:
        self._head = head
        self._member = member
        self._waiting: dict[str, Any] | None = None  # said, and not done yet
        self._placing = 0
        self._lock: int | None = None  # of the run's directory, on the head's machine
        self._leaves = False  # this machine
        self._ready = False  # it was said, and the head may have said "begin"
        self._unready = False  # said behind it: the head answers by "begin", or by sending this machine away
        self._gone = End("failed", f"{GONE} began")  # what is so when the head is gone without a word

    def next(self, plan: Plan) -> Order | None:
        """Answer until it is said what to launch; None when nothing is to be."""
        seats: Seats = {}
        listeners: dict[Node, socket.socket] = {}
        while (said := self.hear()) is not None:
            match said["kind"]:
                case "place":
                    close(listeners)
                    seats = {(role, index): at for role, index, at in said["seats"]}
                    listeners = listeners_of(seats, self._machine)
                    ports = {str(node): listener.getsockname()[1] for node, listener in listeners.items()}
                    self._placing = said["placing"]
                    self._head.say(kind="placed", ports=ports, placing=self._placing)
                case "launch":
                    return self._order(plan, said, seats, listeners)
                case "stop" | "kill":
                    break
                case _:
                    pass  # it was for what has ended here
        close(listeners)
        return None

    def may_begin(self) -> bool:
        """Wait until all machines have room for their processes, so that none is awaited that cannot come.

        False where `next` has to be asked again: it is not to begin, or not so.
        """
        if self._member is not None:
            self._member.attendant.say(kind="listening")
        self._head.say(kind="ready", placing=self._placing)
        self._ready = True
        self._waiting = self.hear()
        self._ready = self._unready = False
        if self._waiting is None or self._waiting["kind"] != "begin":
            return False
        self._waiting = None
        return True

    def ended(self, end: End, leaves: bool) -> bool:
        """What was launched has ended so for this machine. False where that is all, and the user is told.

        Else the head knows more. `leaves`: this machine does.
        """
        self._leaves, self._gone = leaves, OVER
        told = end.status == "finished" and end.reason  # by the head
        if end.status == "finished" and not told:
            return True
        if end.status == "moved" and not leaves:
            self._gone = MOVING
            return True
        self.tell({"left": LEFT, "moved": HANDED_OVER}.get(end.status, end))
        return False

    @property
    def _machine(self) -> int:
        return self._member.machine if self._member is not None else 0

    def _order(self, plan: Plan, said: dict[str, Any], seats: Seats, listeners: dict[Node, socket.socket]) -> Order:
        member = self._member
        if member is None:
            self._lock, before = self._head.take(), self._lock  # held by all that are forked from here, to their end
            if before is not None:
                os.close(before)
            directory = Path(said["directory"])
            if (gpus := said.get("gpus")) is not None:  # whose processes alone touch them
                os.environ["CUDA_VISIBLE_DEVICES"] = gpus
        else:
            directory = member.own / "run" / said["name"]
            shutil.rmtree(directory, ignore_errors=True)  # what was there before was handed over
            directory.mkdir(parents=True)
            take_files(self._head, directory, said["files"])
        if not seats:
            return Order(directory, said["snapshot"])
        addresses = _addresses(said["addresses"], member.head if member is not None else "localhost")
        identity = member.identity if member is not None else msgspec.convert(said["identity"], Identity)
        found = msgspec.convert(said.get("inventory", {}), Inventory)
        lost_after_s = plan.settings.lost_after_s
        site = Site(
            self._machine, seats, addresses, identity, listeners, dict(said["cores"]),
            Pulse(lost_after_s / BEATS, lost_after_s), found, plaintext=plan.settings.plaintext,
            host=member.host if member is not None else "",
        )  # fmt: skip
        return Order(directory, said["snapshot"], site, tuple(said["starts"]))

    def hear(self) -> dict[str, Any] | None:
        """What the head says next; None where this machine does not wait for it any more."""
        if self._waiting is not None:
            said, self._waiting = self._waiting, None
            return said
        if self._member is None:
            return self._head.hear()
        while self._patient(self._member):
            told = self._head.hear()
            if told is not None and told["kind"] == "unattended":
                self._member.attendant.open = False
                continue
            if told is not None and told["kind"] not in ("end", "kill"):
                return told
            if self._unready:
                self.tell(LEFT)
                return None
            moves = told is not None and told["status"] == "moved"
            if not moves or self._leaves:
                end = End(told["status"], told["reason"]) if told is not None and self._gone is not OVER else self._gone
                self.tell(HANDED_OVER if moves else end)
                return None
            self._gone = MOVING
        return None

    def _patient(self, member: Member) -> bool:
        """Wait until the head has said something; False where the user does not.

        A machine that has said that it is ready may be counted on already, and then leaves as one that trains does.
        """
        while True:
            attends = member.attendant.open and not self._unready
            ready = wait([self._head.connection, member.attendant.connection][: 1 + attends])
            if member.attendant.connection in ready:  # it says one thing only, or is gone
                if not self._ready:
                    self.tell(LEFT)
                    return False
                self._unready = True
                self._head.say(kind="unready")
            if self._head.connection.poll():  # else it is about what goes out
                return True

    def tell(self, end: End | None) -> None:
        """The user of a machine that has joined: it takes part no longer."""
        if self._member is not None and end is not None:
            self._member.attendant.say(kind="end", status=end.status, reason=end.reason or OVER.reason)


def close(listeners: Mapping[Node, socket.socket]) -> None:
    for listener in listeners.values():
        listener.close()


def listeners_of(seats: Seats, machine: int) -> dict[Node, socket.socket]:
    """The sockets of those that others call, whoever they are."""
    return {Node(role, index): listening() for (role, index), at in seats.items() if at == machine and role in LISTEN}


def _addresses(told: dict[str, Address], head: str) -> dict[Node, Address]:
    """With the head's own processes where this machine reaches it.

    Names are looked up here, once: who dials must not wait for a name server. Raises `SquallError`.
    """
    hosts = {host or head for host, _ in told.values()}
    numeric = {host: looked_up(host) for host in hosts}
    return {Node.parse(name): (numeric[host or head], port) for name, (host, port) in told.items()}


def looked_up(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise SquallError(
            f"another machine of the run is at {host}, which is not known here ({error}): give squall join there an"
            " --address that all machines know"
        ) from None
