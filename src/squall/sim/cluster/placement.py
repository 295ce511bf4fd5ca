"""Which machine of a cluster each process of a run is on."""

from __future__ import annotations

import heapq

from squall.protocol.nodes import Node
from squall.sim.cluster.cores import Cores
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.parts import MachineKind
from squall.strategies import Recipe


class UsedMachine:
    """One machine: what runs on it, and until when its interface is taken."""

    __slots__ = ("away_until", "cores", "interface", "kind", "number", "receives_until", "sends_until")

    def __init__(self, kind: MachineKind, number: int) -> None:
        self.kind = kind
        self.number = number  # among those of its kind
        self.cores = Cores(kind)
        self.interface = kind.interface
        self.away_until = 0.0  # it was taken away
        self.sends_until = self.receives_until = 0.0  # its interface is full


class Placement:
    """Replicas are spread over the cores of all machines that may have them, shards over those with the fewest.

    A replacement takes the place of the process that it replaces.
    """

    def __init__(self, cluster: Cluster, recipe: Recipe) -> None:
        self.places = [UsedMachine(kind, number) for kind in cluster.machines for number in range(kind.count)]
        self._of: dict[tuple[str, int], UsedMachine] = {}
        self.seats: dict[Node, UsedMachine] = {}  # what `of` has found so far: nodes are asked for again and again
        crowd = [0.0] * len(self.places)  # processes a core
        for role, count in (("replica", recipe.replicas), ("shard", recipe.shards)):
            self._spread(role, range(count), crowd)
        self._spread("coordinator", range(1), crowd)
        self._spread("evaluator", range(recipe.replicas, recipe.replicas + 1), crowd)

    def _spread(self, role: str, indices: range, crowd: list[float]) -> None:
        """The least crowded first; those of equal crowd in the order of the file."""
        able = [(crowd[i], i) for i, place in enumerate(self.places) if role in place.kind.roles]
        heapq.heapify(able)
        for index in indices:
            _, i = able[0]
            place = self._of[role, index] = self.places[i]
            if role in ("replica", "shard"):  # the others hardly compute
                place.cores.alone = crowd[i] == 0
                crowd[i] += 1 / place.kind.cores
            heapq.heapreplace(able, (crowd[i], i))

    def of(self, node: Node) -> UsedMachine:
        place = self.seats.get(node)
        if place is None:
            place = self.seats[node] = self._of[node.role, node.index]
        return place

    def clear(self) -> None:
        """Nobody is there any more."""
        for place in self.places:
            place.cores.clear()

    def on(self, place: UsedMachine) -> list[tuple[str, int]]:
        """(role, index) of what is there."""
        return [key for key, where in self._of.items() if where is place]
