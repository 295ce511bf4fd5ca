"""What a nursery is told before its processes begin: where each process of the run is, and who listens where.

    head -> nursery      the task (a pickle), "place", "launch" with the files of a snapshot behind it, "begin"
    nursery -> head      "built" with what must be the same everywhere, "placed" with ports, "ready", or "failed"

The head is the launching process. On a run's only machine there is "launch" alone.
"""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from squall.errors import SquallError
from squall.launchers.control_pipe import ControlPipe
from squall.protocol.heartbeats import Pulse
from squall.protocol.nodes import Node
from squall.record.inventory import Inventory
from squall.runtime.placement import Seats
from squall.runtime.run_plan import Plan
from squall.runtime.site import Site
from squall.task import Task
from squall.transports.certificates import Identity
from squall.transports.streams import Address
from squall.vector import Layout

BEATS = 4  # of a machine, in the time after which it is taken for lost
MODULES = "modules"  # folder in a member's own directory
BACKLOG = 1024  # processes that may call a listener at once


class Facts(msgspec.Struct, frozen=True):
    """What must be the same on every machine of a run."""

    layout: Layout
    examples: int
    evaluated: bool = True  # there is something to evaluate on

    @classmethod
    def of(cls, task: Task) -> Facts:
        layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
        return cls(layout, task.examples, task.validate is not None)

    def differences(self, other: Facts) -> str:
        """How `other` differs, in words; "" if it does not."""
        found = self.layout.differences(other.layout)[:5]
        if self.examples != other.examples:
            found.append(f"{other.examples} training examples in place of {self.examples}")
        return "; ".join(found)


class Order(NamedTuple):
    """What to launch."""

    directory: Path  # of the run; of this machine's part of it, where the run's own is elsewhere
    snapshot: int | None
    site: Site | None = None


class Member(NamedTuple):
    """A machine that has joined a run."""

    machine: int
    identity: Identity
    head: str  # the host that was called; who is there is reached at it
    attendant: ControlPipe  # leads to `squall join`
    own: Path  # a directory for this machine's part of the run, which is removed at its end


def hear_order(head: ControlPipe, plan: Plan, member: Member | None = None) -> Order | None:
    """Answer until it is said what to launch; None when nothing is to be. `member`: None on the head's machine."""
    pulse = Pulse(plan.lost_after_s / BEATS, plan.lost_after_s)
    seats: Seats = {}
    listeners: dict[Node, socket.socket] = {}
    while (said := next_order(head, member)) is not None:
        machine = member.machine if member is not None else 0
        match said["kind"]:
            case "place":
                seats = {(role, index): at for role, index, at in said["seats"]}
                listeners = listeners_of(seats, machine)
                ports = {str(node): listener.getsockname()[1] for node, listener in listeners.items()}
                head.say(kind="placed", ports=ports)
            case "launch" if member is not None:
                directory = member.own / "run" / said["name"]
                directory.mkdir(parents=True)
                _take_files(head, directory, said["files"])
                addresses = _addresses(said["addresses"], member.head)
                site = Site(
                    machine, seats, addresses, member.identity, listeners, dict(said["cores"]), pulse,
                    plaintext=plan.plaintext,
                )  # fmt: skip
                return Order(directory, said["snapshot"], site)
            case "launch":
                head.take()  # the directory's lock: held by this process, and by all forked from it, to their end
                order = Order(Path(said["directory"]), said["snapshot"])
                if seats:
                    identity = msgspec.convert(said["identity"], Identity)
                    addresses = _addresses(said["addresses"], "localhost")
                    found = msgspec.convert(said["inventory"], Inventory)
                    site = Site(
                        0, seats, addresses, identity, listeners, dict(said["cores"]), pulse, found,
                        plaintext=plan.plaintext,
                    )  # fmt: skip
                    order = order._replace(site=site)
                return order
            case _:
                return None
    return None


def may_begin(head: ControlPipe, member: Member | None) -> bool:
    """Wait until all machines have room for their processes, so that none is awaited that cannot come."""
    head.say(kind="ready")
    said = next_order(head, member)
    return said is not None and said["kind"] == "begin"


def next_order(head: ControlPipe, member: Member | None) -> dict[str, Any] | None:
    """What the head says next; None where this machine does not wait for it any more."""
    if member is not None:
        ready = wait([head.connection, member.attendant.connection])
        while member.attendant.connection not in ready and not head.connection.poll():
            ready = wait([head.connection, member.attendant.connection])
        if member.attendant.connection in ready:
            return None
    said = head.hear()
    if member is not None and (said is None or said["kind"] in ("end", "kill")):
        told = said or {"status": "failed", "reason": "the run's first machine is gone before the training began"}
        member.attendant.say(kind="end", status=told["status"], reason=told["reason"])
        return None
    return said


def listeners_of(seats: Seats, machine: int) -> dict[Node, socket.socket]:
    """The sockets of those that others call, in any version of IP that this machine has."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return {
        Node(role, index): socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=BACKLOG)
        for (role, index), at in seats.items()
        if at == machine and role in ("coordinator", "shard")
    }


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


def _take_files(head: ControlPipe, directory: Path, paths: list[str]) -> None:
    for path in paths:
        file = directory / path
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as opened:
            while piece := head.connection.recv_bytes():
                opened.write(piece)
