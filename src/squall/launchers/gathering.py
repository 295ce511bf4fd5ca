"""The machines of a run, from the first that joins until all of them launch.

Every machine builds the task for itself. They are compared with the head's own, and a run is placed on them when so
many have joined as it wants.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from squall.errors import SquallError, TaskError
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.inventory import in_words, inventory
from squall.launchers.member_messages import understood
from squall.launchers.orders import Facts
from squall.protocol.nodes import Node
from squall.record.inventory import Inventory
from squall.runtime.placement import Seats, place
from squall.strategies import Recipe
from squall.transports.certificates import Identity, machine_name

FILE_PIECE_BYTES = 1 << 20


class Room(NamedTuple):
    """A machine, as it is placed on."""

    cores: int
    gpus: int = 0  # that replicas compute on, in place of cores
    roles: tuple[str, ...] = ("replica", "shard", "coordinator", "evaluator")

    def __str__(self) -> str:
        had = [
            f"{count} {name}{'s' * (count > 1)}" for count, name in ((self.cores, "core"), (self.gpus, "GPU")) if count
        ]
        return ", ".join(had) or "no cores"

    @property
    def spread(self) -> Room:
        """As replicas are spread: over what they compute on."""
        return self._replace(cores=self.gpus or self.cores)


class Step(IntEnum):
    """What a machine was told, or has said, last."""

    JOINED = 0
    PLACED = 1  # it knows who is where
    LAUNCHED = 2  # it knows who listens where, and gets the files of a snapshot
    READY = 3  # it has room for its processes
    BEGUN = 4


@dataclass
class Gathered:
    """A machine of the run."""

    number: int
    name: str
    room: Room
    pipe: ControlPipe
    address: str = ""  # where others reach it; the head's is known to those that have called it
    facts: Facts | None = None  # when it has built the task
    ports: dict[str, int] = field(default_factory=dict)  # of its shards, when it was told who is there
    step: Step = Step.JOINED  # that it has come to


class Launched(NamedTuple):
    """What all machines launch."""

    directory: Path
    snapshot: int | None
    lock: int  # descriptor of the directory's


class Wanted(NamedTuple):
    """What must be there before a run is placed."""

    machines: int  # the head's own included
    least_replicas: int | None = None  # that there are cores for; None: all are placed, whatever cores there are
    threads: int = 1  # of a replica
    device: str = "cpu"  # of the replicas
    plaintext: bool = False  # between machines


class Gathering:
    """On the head. `own` is its nursery."""

    def __init__(
        self, own: Gathered, wanted: Wanted, recipe: Recipe, root: Identity, tell: Callable[[str], None]
    ) -> None:
        self.machines = {0: own}
        self.seats: Seats = {}
        self._wanted = wanted
        self._recipe = recipe
        self._root = root
        self._tell = tell  # to the user
        self._launched: Launched | None = None
        self._first: set[int] = set()  # on which the run is placed; others come later
        self._inventory = Inventory()  # of those
        self.over = False  # those were all ready, and were told to begin
        self._announced: dict[str, Any] = {}
        self._shut = False

    def add(self, machine: Gathered, task: bytes) -> None:
        """A machine has joined: it is given the task."""
        if self._shut:
            machine.pipe.connection.close()
            return
        self.machines[machine.number] = machine
        machine.pipe.send(task)
        self._tell(f"machine {machine.number} has joined: {machine.name}, {machine.room}{self._waits()}")

    def lose(self, number: int) -> None:
        """A machine's connection is over. Before the run is placed, another may come in its stead."""
        lost = self.machines.pop(number)
        if self.over:
            return
        if number in self._first:
            raise SquallError(f"machine {number} ({lost.name}) was lost as the run was launched: launch it again")
        self._tell(f"machine {number} ({lost.name}) is gone again{self._waits()}")

    def announce(self, said: dict[str, Any]) -> None:
        """Tell it to all other machines when they have begun."""
        self._announced = said
        for number, machine in self.machines.items():
            if number and machine.step is Step.BEGUN:
                machine.pipe.say(**said)

    def shut(self, status: str, reason: str) -> None:
        """The run is over: machines that have not begun come too late."""
        self._shut = True
        for number, machine in list(self.machines.items()):
            if number and machine.step is not Step.BEGUN:
                machine.pipe.say(kind="kill", status=status, reason=reason)
                machine.pipe.connection.close()
                del self.machines[number]

    def _waits(self) -> str:
        if self.over:
            return ""
        missing = self._wanted.machines - len(self.machines)
        return f"; waiting for {missing} more" if missing > 0 else f"; {self.waits or 'all are here'}"

    @property
    def _room(self) -> int:
        """Replicas that the machines have cores for."""
        return sum(machine.room.cores // self._wanted.threads for machine in self.machines.values())

    def launch(self, launched: Launched) -> None:
        """As soon as all are ready."""
        self._launched = launched
        self._go_on()

    @property
    def waits(self) -> str:
        """What it is that it waits for, if not only for machines to come."""
        if self.over or self._wanted.machines > len(self.machines) or self._room >= (self._wanted.least_replicas or 0):
            return ""
        least = self._wanted.least_replicas
        return f"there is room for {self._room} replicas, and training begins with {least}: more have to join"

    def understands(self, said: dict[str, Any]) -> bool:
        return understood(said)

    def hear(self, number: int, said: dict[str, Any]) -> bool:
        """Take what a nursery has said; False if it is not for this. Raises `SquallError` for one that differs."""
        machine = self.machines[number]
        match said["kind"]:
            case "built" if machine.facts is None:
                machine.facts = msgspec.convert(said["facts"], Facts)
                self._compare()
            case "placed" if said["ports"].keys() == self._listening(number):
                machine.ports = said["ports"]
            case "ready" if machine.step is Step.LAUNCHED:
                machine.step = Step.READY
            case "failed" if number:
                error = str(TaskError.told(said["error"])) if said["task"] else said["error"]
                self._refuse(machine, f"on machine {number} ({machine.name}): {error}")
            case _:
                return False
        self._go_on()
        return True

    def _compare(self) -> None:
        here = self.machines[0].facts
        for machine in list(self.machines.values()):
            if here is not None and machine.facts is not None and (found := here.differences(machine.facts)):
                why = (
                    f"machine {machine.number} ({machine.name}) has something else to train than this one: {found}."
                    " Have the same data and the same versions of libraries there"
                )
                machine.pipe.say(kind="kill", status="failed", reason=why)  # its user does not know yet
                self._refuse(machine, why)

    def _refuse(self, machine: Gathered, why: str) -> None:
        """The machine cannot take part: a run that has begun goes on without it. Raises `SquallError` before."""
        if not self.over and (not self._first or machine.number in self._first):
            raise SquallError(why)
        del self.machines[machine.number]
        machine.pipe.connection.close()
        self._tell(why)

    def _go_on(self) -> None:
        """Have every machine take the steps that it can: all together those on which the run is placed."""
        machines = list(self.machines.values())
        if self._launched is None or not (self._first or self._place(machines)):
            return
        for machine in machines:
            if machine.step is Step.JOINED and machine.facts is not None:
                self._seat(machine)
        if any(machine.ports.keys() != self._listening(machine.number) for machine in machines):
            return
        for machine in machines:
            if machine.step is Step.PLACED:
                self._send(machine, self._launched)
        self.over = self.over or all(self.machines[number].step is Step.READY for number in self._first)
        for machine in machines:
            if machine.step is Step.READY and self.over:
                self._begin(machine)

    def _place(self, machines: list[Gathered]) -> bool:
        """When as many are here as are wanted, and all have built the task."""
        wanted, least = self._wanted.machines, self._wanted.least_replicas
        if len(machines) < wanted or any(machine.facts is None for machine in machines) or self._room < (least or 0):
            return False
        found = place(
            self._recipe, [machine.room.spread for machine in machines], None if least is None else self._room
        )
        seats = {process: machines[at].number for process, at in found.items()}
        evaluated = any(machine.facts is not None and machine.facts.evaluated for machine in machines)
        self.seats = {process: at for process, at in seats.items() if evaluated or process[0] != "evaluator"}
        self._first = set(self.machines)
        told = [(m.number, m.name, m.room) for m in machines]
        self._inventory = inventory(told, self.seats, self._wanted.plaintext)
        self._tell(in_words(self._inventory))
        return True

    def _begin(self, machine: Gathered) -> None:
        machine.step = Step.BEGUN
        machine.pipe.say(kind="begin")
        if machine.number and self._announced:
            machine.pipe.say(**self._announced)
        if machine.number not in self._first:  # the coordinator is told what it has room for
            self.machines[0].pipe.say(kind="joined", machine=machine.number, cores=machine.room.cores)

    def _listening(self, number: int) -> set[str]:
        """The processes of a machine that others call."""
        seats = self.seats.items()
        return {str(Node(*each)) for each, at in seats if at == number and each[0] in ("coordinator", "shard")}

    def _seat(self, machine: Gathered) -> None:
        seats = [(role, index, at) for (role, index), at in self.seats.items()]
        machine.step = Step.PLACED
        machine.pipe.say(kind="place", seats=seats)

    def _send(self, machine: Gathered, launched: Launched) -> None:
        machine.step = Step.LAUNCHED
        addresses = {name: (m.address, port) for m in self.machines.values() for name, port in m.ports.items()}
        cores = [(number, self.machines[number].room.cores) for number in self._first if number in self.machines]
        told = {"kind": "launch", "snapshot": launched.snapshot, "addresses": addresses, "cores": cores}
        if machine.number == 0:
            identity = self._root.issue(machine_name(0), authority=True)
            where = str(launched.directory.resolve())
            machine.pipe.say(directory=where, identity=identity, inventory=self._inventory, **told)
            machine.pipe.hand(launched.lock)
            return
        files = list(snapshot_files(launched)) if self._has_shards(machine.number) else []
        paths = [str(file.relative_to(launched.directory)) for file in files]
        snapshot = launched.snapshot if files else None
        machine.pipe.say(name=launched.directory.name, files=paths, **{**told, "snapshot": snapshot})
        for file in files:
            for piece in pieces(file):
                machine.pipe.send(piece)
            machine.pipe.send(b"")

    def _has_shards(self, number: int) -> bool:
        return any(role == "shard" and at == number for (role, _), at in self.seats.items())


def snapshot_files(launched: Launched) -> Iterable[Path]:
    """The files that a shard elsewhere needs to go on."""
    if launched.snapshot is not None:
        yield from sorted((launched.directory / "snapshots" / f"{launched.snapshot:06d}").iterdir())


def pieces(file: Path) -> Iterator[memoryview]:
    """Of a file that is not empty. What waits to be sent of it takes no memory."""
    with open(file, "rb") as opened:
        whole = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    for start in range(0, len(whole), FILE_PIECE_BYTES):
        yield whole[start : start + FILE_PIECE_BYTES]
