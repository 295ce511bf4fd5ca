"""The network of a world, on which faults come and go."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from squall.protocol.effects import Send, Transmit
from squall.protocol.nodes import Node
from squall.runtime.wire import Network
from squall.sim.proof.faults import Cut, Jam, Partition, Weather


class FaultyWire:
    """The network of a world: its ordinary latency, and the weather, cuts and partitions of the moment."""

    def __init__(
        self, network: Network, machine: Callable[[Node], int] = lambda node: 0,
        cut: Callable[[Node, Node], bool] = lambda sender, to: False,
    ) -> None:  # fmt: skip
        """`cut`: these two do not know where to reach each other."""
        self._network = network
        self._machine = machine  # on which a node is
        self._cut = cut
        self._faults: list[tuple[float, Weather | Cut | Partition | Jam]] = []  # until when

    def begin(self, fault: Weather | Cut | Partition | Jam, now: float) -> None:
        self._faults.append((now + fault.seconds, fault))

    def parted(self, one: Node, other: Node, now: float) -> bool:
        """Whether their machines are cut off from each other."""
        ends = self._machine(one), self._machine(other)
        partitions = (fault for until, fault in self._faults if until > now and isinstance(fault, Partition))
        return any(fault.severs(*ends) for fault in partitions)

    def arrivals(self, sender: Node, effect: Send | Transmit, now: float, chance: random.Random) -> Sequence[float]:
        self._faults = [(until, fault) for until, fault in self._faults if until > now]
        faults = [fault for _, fault in self._faults]
        if any(isinstance(fault, Cut) and fault.severs(sender, effect.to) for fault in faults):
            return ()
        if self.parted(sender, effect.to, now) or self._cut(sender, effect.to):
            return ()
        jams = [(until, fault) for until, fault in self._faults if isinstance(fault, Jam)]
        now = max((now, *(until for until, jam in jams if jam.holds(sender, self._machine(sender), effect))))
        times = self._network.arrivals(sender, effect, now, chance)
        for weather in (fault for fault in faults if isinstance(fault, Weather)):
            times = [*times, *(at for at in times if chance.random() < weather.duplication)]
            times = [at + chance.random() * weather.jitter_s for at in times if chance.random() >= weather.loss]
        return times
