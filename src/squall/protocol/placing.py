"""On which machine a process starts: which machines there are, what they have room for, and what is on each.

Room is counted in replicas: the cores of a machine that no other replica takes. A process that is to start again keeps
its place for as long as its machine is there; what a machine takes with it goes where most room is left, or waits.
"""

from __future__ import annotations

from squall.protocol.nodes import NURSERY, Node, replica_node, shard_nodes
from squall.protocol.policy import MachineRoom, Policy


class Placing:
    def __init__(self, policy: Policy) -> None:
        replicas = [replica_node(slot, 0) for slot in range(policy.replicas)]
        nodes = (*shard_nodes(policy.shards), *replicas, Node("evaluator", policy.replicas))
        rooms = policy.rooms or (MachineRoom(NURSERY.index, policy.replicas, nodes),)
        self.rooms = {room.machine: room.replicas for room in rooms}
        self.on = {node: room.machine for room in rooms for node in room.nodes}  # it runs there, or is about to
        self.waiting = {node: None for node in replicas if node not in self.on}  # without a place
        self.leaving: dict[int, None] = {}  # machines on which nothing starts any more
        self._several = bool(policy.rooms)

    def free(self, machine: int) -> int:
        """Replicas that the machine has room for yet."""
        if machine in self.leaving:
            return 0
        return self.rooms[machine] - sum(node.role == "replica" for node in self.there(machine))

    def there(self, machine: int) -> list[Node]:
        """What runs there, or is about to."""
        return [node for node, where in self.on.items() if where == machine]

    def succeed(self, node: Node, successor: Node) -> None:
        """The successor takes the node's place, if that is still there."""
        machine = self.on.pop(node, None)
        if machine in self.rooms and machine not in self.leaving:
            self.on[successor] = machine

    def place(self, node: Node) -> tuple[int | None, str]:
        """The machine on which to start it, and why there; None where it has to wait for room."""
        if node in self.on:
            return self.on[node], f"machine {self.on[node]}, where it was" if self._several else ""
        machine, why = self._choose(node)
        if machine is None:
            self.waiting[node] = None
        else:
            self.on[node] = machine
            self.waiting.pop(node, None)
        return machine, why

    def _choose(self, node: Node) -> tuple[int | None, str]:
        if node.role != "replica":  # the coordinator's machine is there for as long as the run is
            return NURSERY.index, f"machine {NURSERY.index}, the coordinator's"
        machine = max(self.rooms, key=lambda machine: (self.free(machine), -machine))
        free = self.free(machine)
        if free <= 0:
            return None, "no machine has room for it"
        return machine, f"machine {machine}, which had room for {free}"

    def add(self, machine: int, room: int) -> None:
        self.rooms[machine] = room
        self._several = True

    def remove(self, machine: int) -> list[Node]:
        """The machine is gone, with all that was there."""
        del self.rooms[machine]
        self.leaving.pop(machine, None)
        gone = self.there(machine)
        for node in gone:
            del self.on[node]
        return gone
