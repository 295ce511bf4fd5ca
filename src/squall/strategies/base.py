"""A strategy is a small frozen dataclass that compiles to one record; nothing else in the engine knows its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

import torch

from squall.checks import require
from squall.strategies.work import Answering, Collective, Loop, Work, ring_share
from squall.task import OptimizerFactory

default_optimizer: OptimizerFactory = partial(torch.optim.AdamW, lr=1e-3)
plain_sgd: OptimizerFactory = partial(torch.optim.SGD, lr=0.1)  # for methods that are derived for it

PUSHES_A_FETCH = 4  # at most, where a replay is to begin at a snapshot: with it the pushes of some fetches are kept


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
        require("replicas", self.replicas, self.replicas >= 1, "at least 1")
        if not isinstance(self.work, Collective | Answering):
            require("shards", self.shards, self.shards >= 1, "at least 1")
        if isinstance(self.work, Loop):
            self.work.check(self.replicas, self.shards)

    @property
    def alone(self) -> bool:
        """It runs in the calling process."""
        return isinstance(self.work, Loop) and self.work.alone

    @property
    def divided(self) -> bool:
        """Replicas divide the optimizer's state among themselves."""
        return isinstance(self.work, Collective) and self.work.shard_optimizer

    @property
    def carried(self) -> float:
        """Of the vector, what a replica sends for a push, and receives for a fetch."""
        if isinstance(self.work, Collective):
            return ring_share(self.replicas) * (1.5 if self.divided else 1.0)  # weights go half as far as gradients
        return 0.0 if self.alone or isinstance(self.work, Answering) else 1.0

    @property
    def why_from_the_start(self) -> str:
        """Why a replay cannot begin at a snapshot, or would need too much that is kept there; empty if it can."""
        if self.alone:
            return "no fetch tells what is behind a snapshot"
        if self.work.local is not None or not isinstance(self.work, Loop):
            return "replicas hold more than they have fetched"
        cadence = self.work.exchanges.cadence
        if cadence.fetch_every > PUSHES_A_FETCH * cadence.push_every:
            return (
                f"each snapshot would have to keep the pushes of many batches, more than {PUSHES_A_FETCH} for a fetch"
            )
        return ""

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


@dataclass(frozen=True, kw_only=True)
class Distributed(Strategy):
    """A strategy for several processes: so many of each, and what they do."""

    replicas: int = 2
    shards: int = 1

    @abstractmethod
    def work(self) -> Work:
        """What the processes do. Raises `ValueError` for settings that cannot be."""

    def recipe(self) -> Recipe:
        return Recipe(replicas=self.replicas, shards=self.shards, work=self.work())
