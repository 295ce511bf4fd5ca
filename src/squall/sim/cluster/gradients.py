"""How long replicas take for a batch: those of one process, and those of several parts on one machine or several."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from squall.protocol.nodes import Node
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.placement import Placement, UsedMachine
from squall.sim.cluster.split_step import Lasting, SplitStep


class GradientTimes:
    """Of each replica, on the machines where its parts are."""

    def __init__(
        self, cluster: Cluster, placement: Placement, own_step_s: float, chance: random.Random
    ) -> None:  # fmt: skip
        """`own_step_s` is as of `Cluster.step_s`."""
        self.steps = {id(kind): cluster.step_s(kind, own_step_s) for kind in cluster.machines}  # of one process
        self.parts = cluster.parts
        self._between = cluster.between
        self._placement = placement
        self._split = cluster.split
        self._chance = chance
        self._known: dict[tuple[tuple[UsedMachine, ...], float], Lasting] = {}

    def lasts(self, node: Node, batches: float) -> Lasting:
        """Of so many batches, alone on its cores. Parts wait for the slowest of them."""
        held = self._placement.parts_of(node)
        if self._split is None:
            kind = held[0].kind
            return Lasting(batches * self.steps[id(kind)] * kind.jitter.draw(self._chance), 1.0)
        found = self._of_parts(self._split, tuple(held), batches)
        slowest = max(place.kind.jitter.draw(self._chance) for place in held)
        return Lasting(slowest * found.seconds, found.cores)

    def _of_parts(self, split: SplitStep, held: tuple[UsedMachine, ...], batches: float) -> Lasting:
        found = self._known.get((held, batches))
        if found is None:
            step_s = max(self.steps[id(place.kind)] for place in held)
            seconds, cores = split.lasts(step_s, batches, partial(self._hop_s, held))
            told_s = self._hop_s(held, 0, -1, 1) + self._hop_s(held, -1, 0, 1)  # what to do, and that it is done
            found = self._known[held, batches] = Lasting(seconds + told_s, cores * seconds / (seconds + told_s))
        return found

    def _hop_s(self, held: Sequence[UsedMachine], source: int, target: int, elements: float) -> float:
        """Until what one part sends is with another one."""
        sender, receiver = held[source], held[target]
        if sender is receiver:
            return sender.kind.send_s(elements)
        bandwidth = min(self._between.bandwidth, sender.kind.interface, receiver.kind.interface)
        return sender.kind.send_s(1) + self._between.latency_s + 4 * elements / bandwidth
