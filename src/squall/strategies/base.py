"""A strategy is a small frozen dataclass that compiles to one record; nothing else in the engine knows its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

import torch

from squall.strategies.work import Alone, Loop, Work
from squall.task import OptimizerFactory

default_optimizer: OptimizerFactory = partial(torch.optim.AdamW, lr=1e-3)
plain_sgd: OptimizerFactory = partial(torch.optim.SGD, lr=0.1)  # for methods that are derived for it


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a strategy comes to.

    Attributes:
        replicas: processes that compute gradients.
        shards: server processes that own the parameters.
        work: what they do.

    Raises:
        ValueError: settings that cannot be, with the remedy.
    """

    replicas: int
    shards: int
    work: Work

    def __post_init__(self) -> None:
        for name in ("replicas", "shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        self.work.check(self.replicas, self.shards)

    @property
    def alone(self) -> bool:
        """It runs in the calling process, without shards and protocol."""
        return isinstance(self.work, Alone)

    @property
    def loop(self) -> Loop:
        """The work of a strategy that trains batch by batch, for those who have to do with no other."""
        assert isinstance(self.work, Loop)
        return self.work


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """What every strategy can do."""

    @abstractmethod
    def recipe(self) -> Recipe:
        """What it comes to. Raises `ValueError` for settings that cannot be."""
