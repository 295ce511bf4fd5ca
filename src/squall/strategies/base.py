"""A strategy is a small frozen dataclass that compiles to one record; nothing else in the engine knows its name."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import torch

from squall.protocol.cadence import Cadence
from squall.protocol.dealing import Dealing
from squall.protocol.rules import Rules
from squall.protocol.sandblaster.method import Rules as MethodRules
from squall.task import OptimizerFactory

default_optimizer: OptimizerFactory = partial(torch.optim.AdamW, lr=1e-3)
plain_sgd: OptimizerFactory = partial(torch.optim.SGD, lr=0.1)  # for methods that are derived for it


@dataclass(frozen=True)
class BatchMethod:
    """A method that looks at a batch as a whole, in place of the loop.

    Attributes:
        rules: of the method.
        examples: of a batch; None, or more than there are: the whole training set.
        portions: that a batch is cut into; None: `Task.batch_size` examples each, and one a replica at least.
        push_every: portions that a replica sums before it pushes.
        backup: late portions are also given to idle replicas.
    """

    rules: MethodRules
    examples: int | None
    portions: int | None
    push_every: int
    backup: bool

    def batch(self, examples: int) -> int:
        """Examples of a batch, of a training set that has so many."""
        return min(self.examples or examples, examples)

    def size(self, batch_size: int, examples: int, replicas: int) -> int:
        """Examples of a portion."""
        batch = self.batch(examples)
        return min(batch_size, max(1, batch // replicas)) if self.portions is None else -(-batch // self.portions)


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
        local: factory of the optimizer that moves a replica's own weights between exchanges; None: they stay as
            fetched (or, with fetch_every above 1, move by SGD with the shards' learning rates).
        pushes: what a replica pushes: the "gradient", the "delta" (fetched weights - own weights), or its "weights"
            (the shards' gradient is then their own weights - the pushed ones).
        pull: how far a fetch moves a replica's own weights towards the shards'; 1 replaces them.
        staleness: what a shard does about it: "ignore", "scale" (learning rate / staleness), or "compensate".
        compensation: lambda of the compensation, times gradient^2 x (weights now - weights that it was computed on).
        adaptive: decay of the running mean of gradient^2 whose root divides lambda; None keeps lambda constant.
        backup: replicas whose pushes a round does not wait for.
        quorum: pushes that close a round; None: those of all but the backup replicas.
        grace: how long a round stays open beyond that, as a share of the last round's duration.
        blocks: equal parts of the vector of which every exchange moves one.
        block_order: "cyclic", or "random": another order in every sweep.
        matched: slower replicas push after fewer batches than `push_every`, so that all push about as often.
        elementwise: the optimizer moves every element by itself, so that shards may cut tensors anywhere.
        late: "drop" a push that comes after its round, or "fold" it into the next.
        prorated: a round with fewer batches than whole pushes have is that much less of a step ("mean" alone).
        batch: a method that takes the place of the loop; then only replicas and shards count of all this.
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
    local: OptimizerFactory | None = None
    pushes: str = "gradient"
    pull: float = 1.0
    staleness: str = "ignore"
    compensation: float = 0.0
    adaptive: float | None = None
    backup: int = 0
    quorum: int | None = None
    grace: float = 0.0
    late: str = "drop"
    blocks: int = 1
    block_order: str = "cyclic"
    elementwise: bool = True
    matched: bool = False
    prorated: bool = False
    batch: BatchMethod | None = None

    def __post_init__(self) -> None:
        """Raise a `ValueError` with the remedy for settings that cannot be."""
        for name in ("replicas", "shards", "push_every", "fetch_every", "blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.max_delay is not None and self.max_delay < 0:
            raise ValueError(f"max_delay is {self.max_delay}: it must be 0 or more, or None for no bound")
        if self.warm_start < 0:
            raise ValueError(f"warm_start is {self.warm_start}: it must be 0 or more examples")
        if not 0 <= self.backup < self.replicas:
            raise ValueError(f"backup is {self.backup} of {self.replicas} replicas: a round needs at least one push")
        if self.shards > 1 and not self.rules().waits_for_all:
            raise ValueError(
                f"{self.shards} shards with rounds that do not wait for all: shards would not agree on who was late,"
                " use shards=1"
            )
        if not (math.isfinite(self.grace) and self.grace >= 0):
            raise ValueError(f"grace is {self.grace}: it must be 0 or more")
        if self.compensation < 0:
            raise ValueError(f"compensation is {self.compensation}: it must be 0 or more")
        if self.adaptive is not None and not 0 <= self.adaptive < 1:
            raise ValueError(f"adaptive is {self.adaptive}: a decay is 0 or more and below 1, or None")
        if self.staleness == "compensate" and (self.overlap or self.gather != "each" or self.fetch_every > 1):
            raise ValueError(
                "staleness='compensate' needs the weights that a gradient was computed on: no overlap,"
                " and a fetch for every push"
            )
        if self.local is not None and self.overlap:
            raise ValueError("a replica with an optimizer of its own cannot overlap: leave overlap out")
        if self.quorum is not None and not 1 <= self.quorum <= self.replicas:
            raise ValueError(
                f"quorum is {self.quorum} of {self.replicas} replicas: it must be from 1 to {self.replicas}"
            )
        for name, values in _CHOICES.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be one of {', '.join(values)}")
        for factory in (self.optimizer, self.local if self.pushes != "gradient" else self.optimizer):
            if not callable(factory):
                raise ValueError("optimizer must be a factory, for example partial(torch.optim.SGD, lr=0.1)")

    @property
    def converges(self) -> bool:
        """It ends by itself."""
        return self.batch is not None and self.batch.examples is None

    @property
    def gathered(self) -> bool:
        """Every round is dealt as a whole, so that a lock-step run is the same every time, whoever asks first."""
        return self.gather == "mean" and self.local is None and self.rules().waits_for_all

    @property
    def answered(self) -> bool:
        """Others wait for a replica's exchanges, so it takes part in them also without data."""
        return self.gather == "mean" or self.max_delay is not None

    @property
    def several_steps(self) -> bool:
        """A loop may step on a batch several times, each time for other groups: every push is an update of its own."""
        every = self.push_every == self.fetch_every == 1 and self.blocks == 1
        return self.gather == "each" and every and not self.overlap and self.local is None

    @property
    def droppable(self) -> bool:
        """A push may come after its round, and to nothing."""
        return not self.rules().waits_for_all and self.late == "drop"

    def rules(self) -> Rules:
        """What the shards' machines know."""
        whole = self.push_every if self.prorated else 0
        return Rules(
            self.gather, self.max_delay, self.staleness == "scale", self.backup, self.quorum, self.grace, self.late,
            whole,
        )  # fmt: skip

    def cadence(self) -> Cadence:
        """What the replicas' machines know."""
        local, answered = self.local is not None, self.answered and not self.gathered
        return _cadence(self.push_every, self.fetch_every, self.overlap, self.gathered, answered, local)

    def dealing(self) -> Dealing:
        """What the coordinator knows."""
        return Dealing(
            self.replicas, self.gathered, self.answered, self.push_every, self.droppable, self.warm_start, self.matched
        )  # fmt: skip


_cadence = cache(Cadence)  # one object for thousands of simulated replicas

_CHOICES = {
    "gather": ("each", "mean"),
    "pushes": ("gradient", "delta", "weights"),
    "staleness": ("ignore", "scale", "compensate"),
    "late": ("drop", "fold"),
    "block_order": ("cyclic", "random"),
}


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """What every strategy can do."""

    in_process: ClassVar[bool] = False  # runs in the calling process, without shards and protocol

    @abstractmethod
    def recipe(self) -> Recipe:
        """The settings of the loop. Raises `ValueError` for settings that cannot be."""
