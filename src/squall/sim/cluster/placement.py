"""Which machine of a cluster each process of a run is on."""

from __future__ import annotations

import math
from collections import Counter

from squall.protocol.nodes import Node
from squall.runtime.placement import Parts, place
from squall.sim.cluster.cores import Cores
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.parts import MachineKind
from squall.sim.cluster.sharing import Way
from squall.strategies import Recipe

BRIEF_S = 1e-3  # who shares an interface for less may as well wait for it, which is cheaper to simulate


class UsedMachine:
    """One machine: what runs on it, and what its interface sends and receives."""

    __slots__ = (
        "away_until", "brief", "cores", "kind", "number", "receives", "receives_until", "sends", "sends_until",
    )  # fmt: skip

    def __init__(self, kind: MachineKind, number: int) -> None:
        self.kind = kind
        self.number = number  # among those of its kind
        self.cores = Cores(kind)
        self.away_until = 0.0  # it was taken away
        self.brief = BRIEF_S * kind.interface  # bytes at most
        self.clear()

    def clear(self) -> None:
        """Nothing runs there any more, and nothing is on its way."""
        self.cores.clear()
        self.sends, self.receives = Way(self.kind.interface), Way(self.kind.interface)  # for what takes long
        self.sends_until = self.receives_until = 0.0  # by what is brief, one after the other


class Placement:
    """Processes where a real run has them too. A replacement takes the place of the process that it replaces."""

    def __init__(self, cluster: Cluster, recipe: Recipe) -> None:
        self.places = [UsedMachine(kind, number) for kind in cluster.machines for number in range(kind.count)]
        parts = cluster.parts
        seats = place(recipe, [used.kind for used in self.places], parts=Parts(parts, cluster.spread_parts))
        self._held = {key: [self.places[i]] for key, i in seats.items()}  # (role, index) -> where each part is
        for slot in range(recipe.replicas if parts > 1 else 0):
            first = self._held["replica", slot]
            numbers = range(slot * parts + 1, (slot + 1) * parts)
            self._held["replica", slot] = first + [self._held.pop(("part", number), first)[0] for number in numbers]
        self.several = len({used for held in self._held.values() for used in held}) > 1  # machines that have processes
        self.seats: dict[Node, UsedMachine] = {}  # what `of` has found so far: nodes are asked for again and again
        self.computing = Counter(  # replicas, or their parts, and shards that are there
            used for (role, _), held in self._held.items() if role in ("replica", "shard") for used in held
        )
        for used, count in self.computing.items():
            used.cores.alone = count == 1 and not (self.several and used.kind.carry < math.inf)

    def of(self, node: Node) -> UsedMachine:
        """The machine of a process; of a replica's first part."""
        used = self.seats.get(node)
        if used is None:
            used = self.seats[node] = self.parts_of(node)[0]
        return used

    def parts_of(self, node: Node) -> list[UsedMachine]:
        """The machine of each part of a replica; one of any other process."""
        return self._held[node.role, node.index]

    def apart(self, sender: Node, to: Node) -> bool:
        """Whether a replica that exchanges with a shard lies on several machines."""
        if "shard" not in (sender.role, to.role):
            return False
        return len({*self.parts_of(to if sender.role == "shard" else sender)}) > 1

    def on(self, used: UsedMachine) -> list[tuple[str, int]]:
        """(role, index) of what is there, or has a part there."""
        return [key for key, held in self._held.items() if used in held]
