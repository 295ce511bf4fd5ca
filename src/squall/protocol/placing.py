"""On which machine a process starts: which machines there are, what they have room for, and what is on each.

Room is counted in places, of which each part of a replica takes one. A process that is to start again keeps its place
for as long as its machine is there; what a machine takes with it goes where most room is left, or waits.

A replica's parts lie together, in the process that the nursery starts and in those that this one forks, or each is a
process of its own (`nodes.part_nodes`), with a place of its own.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from squall.protocol.nodes import NURSERY, Node, part_nodes, replica_node, shard_nodes, whole
from squall.protocol.policy import MachineRoom, Policy


class Placing:
    def __init__(self, policy: Policy) -> None:
        replicas = [replica_node(slot, 0) for slot in range(policy.replicas)]
        backups = [Node("backup", index) for index in range(policy.shards) if policy.copies > 1]
        nodes = (*shard_nodes(policy.shards), *backups, *replicas, Node("evaluator", policy.replicas))
        rooms = policy.rooms or (MachineRoom(NURSERY.index, policy.replicas * policy.parts, nodes),)
        self.rooms = {room.machine: room.places for room in rooms}
        self.on = {node: room.machine for room in rooms for node in room.nodes}  # it runs there, or is about to
        self.waiting = {node: None for node in replicas if node not in self.on}  # without a place
        if policy.deputy and policy.rooms:
            self.waiting[Node("deputy")] = None
        self.home = NURSERY.index  # the coordinator's machine
        self.leaving: dict[int, None] = {}  # machines on which nothing starts any more
        self.closed: dict[int, None] = {}  # machines that are lost as soon as the deputy is parted with
        self._parts, self._spread = policy.parts, policy.spread_parts
        self._several = bool(policy.rooms)

    @property
    def replicas_waiting(self) -> int:
        return sum(node.role == "replica" for node in self.waiting)

    def free(self, machine: int) -> int:
        """Parts of replicas that the machine has room for yet."""
        if machine in self.leaving or machine in self.closed:
            return 0
        taken = sum(places_taken(node, self.on, self._parts) for node in self.there(machine))
        return self.rooms[machine] - taken

    def there(self, machine: int) -> list[Node]:
        """What runs there, or is about to."""
        return [node for node, where in self.on.items() if where == machine]

    def whole(self, node: Node) -> Node:
        """The replica of a part; of any other process the process itself."""
        return whole(node, self._parts)

    def apart(self, node: Node) -> dict[Node, int]:
        """The machines of a replica's other parts, where they do not all lie together; else nothing."""
        return {part: self.on[part] for part in part_nodes(node, self._parts) if part in self.on}

    def vacate(self, node: Node) -> dict[Node, int]:
        """Its places, which it has no longer."""
        return {each: self.on.pop(each) for each in (node, *self.apart(node)) if each in self.on}

    def succeed(self, node: Node, successor: Node) -> None:
        """The successor takes the node's places, if those are still there."""
        machines = self.vacate(node).values()
        if all(machine in self.rooms and machine not in self.leaving for machine in machines):
            self.on.update(zip((successor, *part_nodes(successor, self._parts)), machines))

    def place(self, node: Node) -> tuple[int | None, str]:
        """The machine on which to start it, and why there; None where it has to wait for room."""
        if node in self.on:
            return self.on[node], f"{_named([self.on[node]])}, where it was" if self._several else ""
        machines, why = self._choose(node)
        if machines:
            self.on.update(zip((node, *part_nodes(node, self._parts)), machines))
            self.waiting.pop(node, None)
            return machines[0], why
        self.waiting[node] = None
        return None, why

    def _choose(self, node: Node) -> tuple[list[int], str]:
        """The machine of each process of it; none where there is no room."""
        if node.role == "backup":
            return self._choose_backup(node)
        if node.role == "deputy":
            return self._choose_deputy()
        if node.role != "replica":
            return [self.home], f"machine {self.home}, the coordinator's"
        free = {machine: self.free(machine) for machine in self.rooms}
        found = machines_of(free, self._parts, self._spread)
        if not found:
            return [], "no machine has room for it" if self._parts == 1 else "machines have no room for all its parts"
        had = "which had room for " + " and ".join(str(free[machine]) for machine in dict.fromkeys(found))
        return found, f"{_named(found)}, {had}"

    def _choose_backup(self, node: Node) -> tuple[list[int], str]:
        """Where fewest are, and its shard is not, if there is such a machine."""
        shard = self.on.get(Node("shard", node.index))
        count = {machine: sum(each.role == "backup" for each in self.there(machine)) for machine in self.rooms}
        able = [machine for machine in count if machine not in self.leaving]
        found = min(able, key=lambda machine: (machine == shard, count[machine], machine))
        beside = "beside its shard, since there is no other machine" if found == shard else "which has fewest of them"
        return [found], f"{_named([found])}, {beside}"

    def _choose_deputy(self) -> tuple[list[int], str]:
        """Where fewest processes are, and the coordinator is not."""
        able = [machine for machine in self.rooms if machine != self.home and machine not in self.leaving]
        if not able:
            return [], "there is no other machine, and the loss of the coordinator's is not survived"
        found = min(able, key=lambda machine: (len(self.there(machine)), machine))
        return [found], f"{_named([found])}, which has fewest processes"

    def add(self, machine: int, room: int) -> None:
        self.rooms[machine] = room
        self._several = True

    def remove(self, machine: int) -> tuple[list[Node], dict[Node, dict[Node, int]]]:
        """The machine is gone, with all that was there.

        Returns that, and of each replica that had a part there the processes elsewhere, with their machines.
        """
        del self.rooms[machine]
        self.leaving.pop(machine, None)
        gone = self.there(machine)
        elsewhere = {}
        for node in dict.fromkeys(map(self.whole, gone)):
            elsewhere[node] = {process: at for process, at in self.vacate(node).items() if at != machine}
        return gone, elsewhere


def places_taken(node: Node, on: Container[Node], parts: int) -> int:
    """By a process; `on` has all that have a place."""
    if node.role == "replica":
        return parts if all(part not in on for part in part_nodes(node, parts)) else 1
    return int(node.role == "part")


def machines_of(free: Mapping[int, int], parts: int, spread: bool | None) -> list[int]:
    """The machines of a replica's processes, by what each machine has room for; none where there is not enough.

    One for all parts where one has room for them; else one for each part, of as few machines as possible, or with
    `spread` of as many; where that is None, none. Those with most room come first.
    """
    own = dict.fromkeys((machine for machine, room in free.items() if room > 0), 0)
    if sum(free[machine] for machine in own) < parts:
        return []
    found = []
    for _ in range(parts):
        able = (machine for machine in own if own[machine] < free[machine])
        found.append(min(able, key=lambda m: (own[m] if spread else -own[m], own[m] - free[m], m)))
        own[found[-1]] += 1
    if len(set(found)) > 1:
        return found if spread is not None else []
    return found[:1]


def _named(machines: list[int]) -> str:
    several = list(dict.fromkeys(machines))
    return f"machine{'s' * (len(several) > 1)} {' and '.join(map(str, several))}"
