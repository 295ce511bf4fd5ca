"""What can go wrong in a world, as small values: a world's faults are a list, so that one can be left out.

A fault comes before the world's event number `at`, counted over all lives of the run, and heals by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from squall.protocol.effects import Send, Transmit
from squall.protocol.nodes import COORDINATOR, Node


@dataclass(frozen=True)
class Role:
    """A role's process, whatever its incarnation. There is one coordinator and one evaluator."""

    role: str
    index: int = 0

    @classmethod
    def of(cls, node: Node) -> Role:
        return cls(node.role, 0 if node.role == "evaluator" else node.index)

    def __str__(self) -> str:
        return self.role if self.role in ("coordinator", "evaluator") else f"{self.role} {self.index}"


@dataclass(frozen=True)
class Weather:
    """Frames between any two nodes are lost, doubled, and late, each by itself, so that they overtake each other."""

    at: int
    seconds: float
    loss: float
    duplication: float
    jitter_s: float

    def __str__(self) -> str:
        return (
            f"for {self.seconds:.2f} s {self.loss:.0%} of frames are lost, {self.duplication:.0%} come twice, all up to"
            f" {self.jitter_s:.3f} s late"
        )


@dataclass(frozen=True)
class Cut:
    """Nothing passes from one node to another."""

    at: int
    seconds: float
    sender: Role
    receiver: Role
    both_ways: bool

    def __str__(self) -> str:
        arrow = "<->" if self.both_ways else "->"
        return f"{self.sender} {arrow} {self.receiver} is cut for {self.seconds:.2f} s"

    def severs(self, sender: Node, receiver: Node) -> bool:
        ends = (Role.of(sender), Role.of(receiver))
        return ends == (self.sender, self.receiver) or (self.both_ways and ends == (self.receiver, self.sender))


@dataclass(frozen=True)
class Pause:
    """The process stands still, and goes on."""

    at: int
    seconds: float
    part: Role

    def __str__(self) -> str:
        return f"{self.part} stands still for {self.seconds:.2f} s"


@dataclass(frozen=True)
class Hang:
    """The process does nothing any more, stopped or in the midst of what it computes, until somebody kills it."""

    at: int
    seconds: float  # in which it is
    part: Role
    stopped: bool

    def __str__(self) -> str:
        return f"{self.part} hangs, {'stopped' if self.stopped else 'as if it computed'}"


@dataclass(frozen=True)
class Kill:
    """The process is gone, and replaced or succeeded."""

    at: int
    part: Role
    seconds: float = 0.0  # that its replacement takes to start
    again: int = 0  # replacements that die as soon as they start
    steps: int | None = None  # it dies behind so many of what its next events have it do
    untold: bool = False  # and before it could say that it had done the last of them
    cut: bool = False  # it dies when its journal has been cut, before the event that follows is in it
    torn: bool = False  # it dies inside one of the updates that an event has it make, the one of that number; or behind

    def __str__(self) -> str:
        if self.torn or self.cut:
            inside = "behind an update, untold" if self.untold else "inside an update"
            return f"{self.part} is killed " + (inside if self.torn else "as its journal is cut")
        if self.steps is not None:
            return f"{self.part} is killed {self.steps} steps into an event" + ", the last untold" * self.untold
        return f"{self.part} is killed" + (f", and {self.again} in its place as they start" if self.again else "")


@dataclass(frozen=True)
class Skew:
    """The process's clock is wrong from the beginning: offset + rate x the world's."""

    part: Role
    rate: float
    offset_s: float
    at: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"the clock of {self.part} runs {self.rate:.2f} times as fast, {self.offset_s:.0f} s ahead"


@dataclass(frozen=True)
class _Moment:
    """What happens in a moment, and has nothing to heal."""

    at: int
    seconds: float = 0.0


class Spoil(_Moment):
    """The next computation gives NaN."""

    def __str__(self) -> str:
        return "the next gradient is not finite"


class Rot(_Moment):
    """The next batch that is computed gives NaN then and ever after, until the run ends by it and the user mends it."""

    def __str__(self) -> str:
        return "the next batch is never finite"


@dataclass(frozen=True)
class Tear:
    """The connections of a group that trains by all-reduce break, and nobody dies; so long nobody has another."""

    at: int
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"the group breaks, and none forms for {self.seconds:.2f} s"


class FullDisk(_Moment):
    """The next file of a snapshot cannot be written."""

    def __str__(self) -> str:
        return "the disk is full for one file"


class UserStop(_Moment):
    """The user stops the run, and resumes it when it has ended."""

    def __str__(self) -> str:
        return "the user stops the run, and resumes it"


@dataclass(frozen=True)
class Partition:
    """Connections from a machine to another, or to all others, break, and what was under way on them is lost."""

    at: int
    seconds: float
    machine: int
    other: int | None

    def severs(self, one: int, other: int) -> bool:
        return one != other and self.machine in (one, other) and self.other in (None, one, other)

    def __str__(self) -> str:
        others = "all others" if self.other is None else f"machine {self.other}"
        return f"machine {self.machine} is cut off from {others} for {self.seconds:.2f} s"


@dataclass(frozen=True)
class MachineGone:
    """The machine stands still for ever, with all its processes, and nobody is told."""

    at: int
    machine: int
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"machine {self.machine} is gone"


@dataclass(frozen=True)
class Suspend:
    """The machine stands still with all its processes, and goes on."""

    at: int
    seconds: float
    machine: int

    def __str__(self) -> str:
        return f"machine {self.machine} stands still for {self.seconds:.2f} s"


@dataclass(frozen=True)
class MachineLeaves:
    """Its user takes the machine back, in order."""

    at: int
    machine: int
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"machine {self.machine} is to leave"


@dataclass(frozen=True)
class MachineComes:
    """One more machine joins."""

    at: int
    machine: int
    room: int
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"machine {self.machine} joins, with room for {self.room}"


@dataclass(frozen=True)
class Jam:
    """What a machine's nursery and the coordinator say to each other waits behind numbers, which go on coming.

    So do the numbers of a snapshot's files that come from there.
    """

    at: int
    seconds: float
    machine: int

    def __str__(self) -> str:
        return f"for {self.seconds:.2f} s nothing but numbers comes through from machine {self.machine}"

    def holds(self, sender: Node, machine: int, effect: Send | Transmit) -> bool:
        """`machine` is the sender's."""
        if effect.payload is not None and effect.payload.kind == "piece":
            return machine == self.machine
        return {sender, effect.to} == {COORDINATOR, Node("nursery", self.machine)}


@dataclass(frozen=True)
class Lie:
    """A process says what no process would say, to a shard, or the coordinator if it is a nursery."""

    at: int
    part: Role
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.part} says what nobody would say"


OfMachines = Partition | Jam | MachineGone | MachineLeaves | MachineComes
Fault = (
    Weather | Cut | Pause | Hang | Suspend | Kill | Skew | Spoil | Rot | Tear | FullDisk | UserStop | Lie | OfMachines
)
