"""The machines of a run, from the first that joins until all of them launch.

Every machine builds the task for itself. They are compared with the head's own, and a run is placed on them when so
many have joined as it wants. A run that moves is placed anew, on the machines that stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from squall.errors import SquallError, TaskError
from squall.launchers.files import give_files
from squall.launchers.inventory import in_words, inventory
from squall.launchers.member_messages import understood
from squall.launchers.orders import LISTEN, Facts
from squall.launchers.roster import Gathered, Launched, Standing, Step, Wanted
from squall.protocol.nodes import Node
from squall.protocol.placing import places_taken
from squall.record.inventory import Inventory
from squall.runtime.placement import Parts, Seats, place
from squall.strategies import Recipe
from squall.transports.certificates import Identity, machine_name
from squall.transports.streams import Address


class Gathering:
    """On the head. `own` is the nursery of its machine."""

    def __init__(
        self, own: Gathered, wanted: Wanted, recipe: Recipe | None, root: Identity, tell: Callable[[str], None]
    ) -> None:
        self.machines, self._own = {own.number: own}, own
        self.seats: Seats = {}
        self._elsewhere: dict[str, Address] = {}  # of processes on machines that joined another head
        self._wanted = wanted
        self._recipe = recipe
        self._root = root
        self._tell = tell  # to the user
        self._launched: Launched | None = None
        self._first: set[int] = set()  # on which the run is placed; others come later
        self._inventory = Inventory()  # of those
        self._placings = 0  # how often all were to be placed anew
        self.over = False  # those were all ready, and were told to begin
        self.closing = False  # what ran has ended: nobody begins in it any more
        self._announced: dict[str, Any] = {}
        self._shut = False

    def go_on(self, standing: Standing) -> None:
        """With a run that has begun: all that join are late."""
        own = self._own
        own.facts, own.step, self.seats = standing.facts, Step.BEGUN, standing.seats
        here = self._listening(own.number)
        own.ports = {name: port for name, (_, port) in standing.addresses.items() if name in here}
        self._elsewhere = {name: at for name, at in standing.addresses.items() if name not in here}
        self._first, self.over = {own.number}, True
        self._launched = Launched(standing.directory, None, -1)

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
        if number in self._first and not self._placings:
            raise SquallError(f"machine {number} ({lost.name}) was lost as the run was launched: launch it again")
        self._tell(f"machine {number} ({lost.name}) is gone again{self._waits()}")
        if number in self._first:
            self._anew()

    def announce(self, said: dict[str, Any]) -> None:
        """Tell it to all other machines when they have begun."""
        self._announced = said
        for machine in [each for each in self._others if each.step is Step.BEGUN]:
            machine.pipe.say(**said)

    def shut(self, status: str, reason: str) -> None:
        """The run is over: machines that have not begun come too late."""
        self._shut = True
        for machine in self._others:
            if machine.step < Step.BEGUN:
                machine.pipe.say(kind="kill", status=status, reason=reason)
                machine.pipe.connection.close()
                del self.machines[machine.number]

    @property
    def _others(self) -> list[Gathered]:
        return [machine for machine in self.machines.values() if machine is not self._own]

    def _waits(self) -> str:
        if self.begun:
            return ""
        missing = self._wanted.machines - len(self.machines)
        return f"; waiting for {missing} more" if missing > 0 else f"; {self.waits or 'all are here'}"

    @property
    def _room(self) -> int:
        """Replicas that the machines have cores for."""
        places = sum(machine.room.cores // self._wanted.threads for machine in self.machines.values())
        return places // self._wanted.parts

    @property
    def begun(self) -> bool:
        """The run has, once."""
        return self.over or self._placings > 0

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

    def again(self, snapshot: int | None) -> None:
        """What ran is over: have it go on from this snapshot on the machines that stay."""
        assert self._launched is not None
        self._launched = self._launched._replace(snapshot=snapshot)
        for machine in [each for each in self._others if each.leaves or each.step is Step.BEGUN]:
            del self.machines[machine.number]
            how = "has left" if machine.leaves else "is silent"
            machine.pipe.say(kind="kill", status="failed", reason="the run goes on without this machine")
            machine.pipe.connection.close()
            self._tell(f"machine {machine.number} ({machine.name}) {how}: the run goes on without it")
        self._anew()

    def _anew(self) -> None:
        self._placings += 1
        self._first, self._announced = set(), {}
        self.over = self.closing = False
        for machine in self.machines.values():
            machine.step, machine.ports = Step.JOINED, {}
        self._go_on()

    def hear(self, number: int, said: dict[str, Any]) -> bool:
        """Take what a nursery has said; False if it is not for this. Raises `SquallError` for one that differs."""
        machine = self.machines[number]
        match said["kind"]:
            case "built" if machine.facts is None:
                machine.facts = msgspec.convert(said["facts"], Facts)
                self._compare()
            case "unready" if machine is not self._own and machine.step < Step.BEGUN:
                machine.pipe.connection.close()  # one that was told to begin leaves in order when it has
                self.lose(number)
            case "placed" | "ready" if said.get("placing", 0) != self._placings:
                pass  # since when all is different
            case "placed" if said["ports"].keys() == self._listening(number):
                machine.ports = said["ports"]
            case "ready" if machine.step is Step.LAUNCHED:
                machine.step = Step.READY
            case "failed" if machine is not self._own:
                error = str(TaskError.told(said["error"])) if said["task"] else said["error"]
                self._refuse(machine, f"on machine {number} ({machine.name}): {error}")
            case _:
                return False
        self._go_on()
        return True

    def _compare(self) -> None:
        here = self._own.facts
        for machine in list(self.machines.values()):
            if here is not None and machine.facts is not None and (found := here.differences(machine.facts)):
                why = (
                    f"machine {machine.number} ({machine.name}) has another task than this one: {found}."
                    " Have the same data and the same versions of libraries there"
                )
                machine.pipe.say(kind="kill", status="failed", reason=why)  # its user does not know yet
                self._refuse(machine, why)

    def _refuse(self, machine: Gathered, why: str) -> None:
        """The machine cannot take part: a run that has begun goes on without it. Raises `SquallError` before."""
        if not self.begun and (not self._first or machine.number in self._first):
            raise SquallError(why)
        machine.pipe.connection.close()
        self._tell(why)
        self.lose(machine.number)

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
            if machine.step is Step.READY and self.over and not self.closing:
                self._begin(machine)

    def _place(self, machines: list[Gathered]) -> bool:
        """When as many are here as are wanted, and all have built the task; anew, on those that have."""
        at_most = None if self._wanted.least_replicas is None else self._room
        if self._placings:
            machines = [machine for machine in machines if machine.facts is not None]
            at_most = max(1, sum(map(self._keeps, machines)) // self._wanted.parts)
        elif not self._complete(machines):
            return False
        elif not self._room and self._wanted.parts > 1:
            raise SquallError(
                f"a replica has {self._wanted.parts} parts of {self._wanted.threads} threads each, and machines have"
                " fewer cores: have more machines join (--machines), or use fewer --parts or --threads"
            )
        wanted = self._wanted
        assert self._recipe is not None
        parts = Parts(wanted.parts, wanted.spread_parts, wanted.threads)
        try:
            found = place(self._recipe, [machine.room.spread for machine in machines], at_most, parts, wanted.copies)
        except ValueError as error:
            self._tell(f"{error}: more machines have to join")
            return False
        seats = {process: machines[at].number for process, at in found.items()}
        evaluated = any(machine.facts is not None and machine.facts.evaluated for machine in machines)
        self.seats = {process: at for process, at in seats.items() if evaluated or process[0] != "evaluator"}
        self._first = {machine.number for machine in machines}
        self._inventory = inventory([(m.number, m.name, m.room) for m in machines], self.seats, wanted.plaintext, parts)
        self._tell(in_words(self._inventory))
        return True

    def _complete(self, machines: list[Gathered]) -> bool:
        """These are what the run wants to begin with."""
        built = all(machine.facts is not None for machine in machines)
        return len(machines) >= self._wanted.machines and built and self._room >= (self._wanted.least_replicas or 0)

    def _keeps(self, machine: Gathered) -> int:
        """Parts of replicas for which a machine has cores, or that it has had though it has not."""
        on = {Node(*process): at for process, at in self.seats.items()}
        had = sum(places_taken(node, on, self._wanted.parts) for node, at in on.items() if at == machine.number)
        return max(had, machine.room.cores // self._wanted.threads)

    def _begin(self, machine: Gathered) -> None:
        machine.step = Step.BEGUN
        machine.pipe.say(kind="begin")
        if machine is not self._own and self._announced:
            machine.pipe.say(**self._announced)
        if machine.number not in self._first:  # the coordinator is told what it has room for
            self._own.pipe.say(kind="joined", machine=machine.number, cores=machine.room.cores)

    def _listening(self, number: int) -> set[str]:
        """The processes of a machine that others call."""
        seats = self.seats.items()
        return {str(Node(*each)) for each, at in seats if at == number and each[0] in LISTEN}

    def _seat(self, machine: Gathered) -> None:
        seats = [(role, index, at) for (role, index), at in self.seats.items()]
        machine.step = Step.PLACED
        machine.pipe.say(kind="place", seats=seats, placing=self._placings)

    def _send(self, machine: Gathered, launched: Launched) -> None:
        machine.step = Step.LAUNCHED
        addresses = {name: (m.address, port) for m in self.machines.values() for name, port in m.ports.items()}
        addresses |= self._elsewhere
        cores = [(number, self.machines[number].room.cores) for number in self._first if number in self.machines]
        starts = facts.starts if (facts := self._own.facts) is not None else ()
        told = {
            "kind": "launch", "snapshot": launched.snapshot, "addresses": addresses, "cores": cores, "starts": starts
        }  # fmt: skip
        if machine is self._own:
            identity = self._root.issue(machine_name(0), authority=True)
            where = str(launched.directory.resolve())
            machine.pipe.say(
                directory=where, identity=identity, inventory=self._inventory, gpus=launched.gpus, **told
            )  # fmt: skip
            machine.pipe.hand(launched.lock)
            return
        files = launched.files if self._has_weights(machine.number) else []
        paths = [str(file.relative_to(launched.directory)) for file in files]
        snapshot = launched.snapshot if files else None
        machine.pipe.say(name=launched.directory.name, files=paths, **{**told, "snapshot": snapshot})
        give_files(machine.pipe, files)

    def _has_weights(self, number: int) -> bool:
        """It begins with those of a snapshot: so do all whose parts may belong to one replica."""
        shards = any(role == "shard" for role, _ in self.seats)
        keeper = "shard" if shards else "replica"
        together = self._wanted.parts > 1 and not shards
        return together or any(role == keeper and at == number for (role, _), at in self.seats.items())
