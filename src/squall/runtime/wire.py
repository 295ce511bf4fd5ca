"""The network of a world: when frames arrive, if they do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from squall.protocol.effects import Send, Transmit
from squall.protocol.nodes import Node


class Wire(Protocol):
    """What happens to frames between nodes."""

    def arrivals(self, sender: Node, effect: Send | Transmit, now: float, chance: random.Random) -> Sequence[float]:
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
