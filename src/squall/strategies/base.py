"""A strategy is a small frozen dataclass that compiles to one record; nothing else in the engine knows its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from squall.protocol.dealing import Dealing
from squall.protocol.replica import Cadence
from squall.protocol.shard import Rules
from squall.task import OptimizerFactory

default_optimizer: OptimizerFactory = partial(torch.optim.SGD, lr=0.01)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of the one loop that all data-parallel algorithms are.

    Attributes:
        replicas: processes that compute gradients.
        shards: server processes that own the parameters.
        optimizer: factory of the shards' elementwise optimizer.
        push_every: batches whose gradients are summed into one push.
        fetch_every: batches between fetches; between them the replica moves its weights by SGD.
        gather: "each" push is an update, or "mean": one update for the pushes of all replicas together.
        max_delay: exchanges that a replica may be ahead of the slowest; None for any number.
        warm_start: examples that one replica trains alone first.
        overlap: compute the next gradient while the last one is exchanged.
    """

    replicas: int
    shards: int
    optimizer: OptimizerFactory
    push_every: int = 1
    fetch_every: int = 1
    gather: str = "each"
    max_delay: int | None = None
    warm_start: int = 0
    overlap: bool = False

    def __post_init__(self) -> None:
        """Raise a `ValueError` with the remedy for settings that cannot be."""
        for name in ("replicas", "shards", "push_every", "fetch_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.max_delay is not None and self.max_delay < 0:
            raise ValueError(f"max_delay is {self.max_delay}: it must be 0 or more, or None for no bound")
        if self.warm_start < 0:
            raise ValueError(f"warm_start is {self.warm_start}: it must be 0 or more examples")
        if not callable(self.optimizer):
            raise ValueError("optimizer must be a factory, for example partial(torch.optim.SGD, lr=0.1)")

    @property
    def gathered(self) -> bool:
        return self.gather != "each"

    def rules(self) -> Rules:
        return Rules(self.gather, self.max_delay)

    def cadence(self) -> Cadence:
        return Cadence(self.push_every, self.fetch_every, self.overlap, self.gathered)

    def dealing(self) -> Dealing:
        bounded = self.max_delay is not None
        return Dealing(self.replicas, self.gathered, bounded, self.push_every, self.warm_start)


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """What every strategy can do."""

    in_process: ClassVar[bool] = False  # runs in the calling process, without shards and protocol

    @abstractmethod
    def recipe(self) -> Recipe:
        """The settings of the loop. Raises `ValueError` for settings that cannot be."""
