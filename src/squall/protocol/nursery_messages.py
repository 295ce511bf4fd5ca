"""The messages about machines: those of their nurseries, one on each machine of a run, and of others about them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from squall.protocol.messages import Address, Count, Seconds, Struct
from squall.protocol.nodes import Node


class Placed(Struct, frozen=True, tag="placed", array_like=True, gc=False):
    """To a shard: this process starts on that machine. Whoever has its name elsewhere is another one.

    To others, of a shard or the coordinator: it goes on on that machine, and is called there; so is a deputy.
    """

    node: Node
    machine: Count
    address: Address = ""


class PartPlace(Struct, frozen=True, array_like=True, gc=False):
    """Where a part of a replica is. `address` is where the others call it, if it is known yet.

    To another part as it starts: with the `shards` that are not where they began.
    """

    node: Node
    machine: Count
    address: Address = ""
    shards: tuple[Placed, ...] = ()


class StartProcess(Struct, frozen=True, tag="start", array_like=True, gc=False):
    """To a nursery: start this process on your machine.

    `first` is given where a replica lies on several machines: the place of its first part, which the others call, and
    which is `node` itself where that is what to start.
    """

    node: Node
    first: PartPlace | None = None
    ends: Node | None = None  # its backup, on your machine: not before that has ended


class KillProcess(Struct, frozen=True, tag="kill", array_like=True, gc=False):
    """To a nursery: this process belongs to a replica that is gone. `ProcessLost` answers, when it is gone as well."""

    node: Node


class PartsPlaced(Struct, frozen=True, tag="parts", array_like=True, gc=False):
    """To a replica that lies on several machines: its other parts are started there, and will call."""

    places: tuple[PartPlace, ...]


class ProcessLost(Struct, frozen=True, tag="lost", array_like=True, gc=False):
    """The process has ended without having been told to, or could not be started.

    Where it hung, it had stood still for so long, which was no life. A shard may have died inside an update.
    """

    node: Node
    why: str
    stood_s: Seconds = 0.0
    torn: bool = False


class ProcessStuck(Struct, frozen=True, tag="stuck", array_like=True, gc=False):
    """The process stands still, and is not killed: what is the matter, for people."""

    node: Node
    why: str


class StopAsked(Struct, frozen=True, tag="stop?", array_like=True, gc=False):
    """Somebody on the nursery's machine wants the run to end. The fields are those of `events.StopRequested`."""

    why: str
    failed: bool
    wanted: bool


class Leaving(Struct, frozen=True, tag="leave?", array_like=True, gc=False):
    """The machine is to be taken away: the nursery hears `Stop` when nothing of the run needs it any more.

    In answer: the replicas there were told to leave. Where a shard is there the run moves, in the time that it needs.
    """

    why: str


class Joined(Struct, frozen=True, tag="joined", array_like=True, gc=False):
    """The launching process has a nursery on one more machine, with room for so many replicas."""

    machine: Count
    room: Count


class Alive(Struct, frozen=True, tag="alive", array_like=True, gc=False):
    """The nursery's machine is there; and so, in answer, is the coordinator."""


class Replaced(Struct, frozen=True, tag="replaced", array_like=True, gc=False):
    """To a nursery: your machine was taken for lost, and its work was given to others, so it must not go on."""

    why: str


class Spent(Struct, frozen=True, array_like=True, gc=False):
    """What a process has done with some seconds; what is missing is its own work on messages, or rest."""

    node: Node
    seconds: Seconds
    compute_s: Seconds = 0.0
    apply_s: Seconds = 0.0
    send_s: Seconds = 0.0  # in which it has brought numbers to their places, or on their way
    wait_s: Seconds = 0.0
    awaited: Node | None = None  # whom it has waited for longest
    awaited_s: Seconds = 0.0
    memory: Count = 0  # bytes beyond those that all have from their nursery
    copied_s: Seconds = 0.0  # for its backup, of what it has waited


class Activity(Struct, frozen=True, tag="activity", array_like=True, gc=False):
    """What the processes on the nursery's machine have done since the last time: for the record."""

    spent: Annotated[tuple[Spent, ...], msgspec.Meta(max_length=1 << 16)]


class Leads(Struct, frozen=True, tag="leads", array_like=True, gc=False):
    """To the nursery on whose machine the coordinator goes on: others may join there, under numbers from this one."""

    number: Count


class Heard(Struct, frozen=True, tag="heard", array_like=True, gc=False):
    """To the coordinator: something has come from these, though perhaps no whole message, so their machines are there.

    On a slow link what a nursery says waits behind numbers.
    """

    nodes: tuple[Node, ...]


class Refused(Struct, frozen=True, tag="refused", array_like=True, gc=False):
    """To the coordinator: this process has said what none would say. Nothing of it is heard here any more."""

    node: Node
    why: str


Message = (
    StartProcess | KillProcess | PartsPlaced | ProcessLost | ProcessStuck | StopAsked | Leaving | Alive | Replaced
    | Placed | Leads | Heard | Refused | Activity | Joined
)  # fmt: skip
