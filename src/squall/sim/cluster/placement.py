"""Which machine of a cluster each process of a run is on."""

from __future__ import annotations

import math
from collections import Counter

from squall.protocol.nodes import Node
from squall.runtime.placement import place
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
        seats = place(recipe, [used.kind for used in self.places])
        self.several = len(set(seats.values())) > 1  # machines that have processes
        self._of = {key: self.places[i] for key, i in seats.items()}
        self.seats: dict[Node, UsedMachine] = {}  # what `of` has found so far: nodes are asked for again and again
        computing = Counter(i for (role, _), i in seats.items() if role in ("replica", "shard"))
        for i, count in computing.items():
            self.places[i].cores.alone = count == 1 and not (self.several and self.places[i].kind.carry < math.inf)

    def of(self, node: Node) -> UsedMachine:
        used = self.seats.get(node)
        if used is None:
            used = self.seats[node] = self._of[node.role, node.index]
        return used

    def on(self, used: UsedMachine) -> list[tuple[str, int]]:
        """(role, index) of what is there."""
        return [key for key, where in self._of.items() if where is used]
