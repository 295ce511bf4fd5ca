"""How fast things go in a world: when frames arrive, if they do, and what else takes time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from squall.protocol.effects import Effect, Send, Transmit
from squall.protocol.nodes import Node
from squall.runtime.world_nodes import Clock

Price = Callable[[Node, Any, float], float]  # seconds that an effect takes which a node begins at a time


class Passage:
    """A frame that is under way for long: what sets out after it may put its arrival off."""

    __slots__ = ()

    def arrives(self, now: float) -> float:
        """When it will, as far as is known at the world's time. Asked at that time once more, unless that is past."""
        raise NotImplementedError


class Wire(Protocol):
    """What happens to frames between nodes."""

    def arrivals(
        self, sender: Node, effect: Send | Transmit, now: float, chance: random.Random
    ) -> Sequence[float | Passage]:
        """When copies of the frame arrive, at `now` or later; none: it is lost."""


@dataclass(frozen=True)
class Network:
    """The same wire between any two nodes. Times in seconds; chances from 0 to 1."""

    latency_s: float = 0.0
    jitter_s: float = 0.0  # uniform on top of the latency, so frames overtake each other
    loss: float = 0.0
    duplication: float = 0.0

    def arrivals(self, sender: Node, effect: Send | Transmit, now: float, chance: random.Random) -> Sequence[float]:
        at = now + self.latency_s
        if not (self.jitter_s or self.loss or self.duplication):
            return (at,)
        copies = 1 + (chance.random() < self.duplication)
        return [at + chance.random() * self.jitter_s for _ in range(copies) if chance.random() >= self.loss]


@dataclass(frozen=True)
class Conditions:
    """What takes how long in a world.

    Attributes:
        network: when frames arrive.
        prices: seconds that effects take, by their type. A message has a price only if weights travel along.
        notice_s: until a nursery hears that a process of its machine died.
        spawn_s: until a replacement is there.
        clock: each node's own clock; None: the world's.
    """

    network: Wire = Network()
    prices: Mapping[type[Effect], Price] = field(default_factory=dict)
    notice_s: float = 0.0
    spawn_s: Callable[[Node], float] = lambda node: 0.0
    clock: Callable[[Node], Clock | None] = lambda node: None


IDEAL = Conditions()  # nothing takes any time
