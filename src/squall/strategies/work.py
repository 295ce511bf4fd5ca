"""The kinds of work that a strategy may compile to: the loop over batches, L-BFGS, all-reduce, and answers alone.

Of each may be asked: `every` (batches, or portions of one, between two pushes of a replica), `blocks` (equal parts of
the vector of which every exchange moves one), `buffers` (of weights, and of gradients, that a replica has in the
arena), `local`, `converges` (it ends by itself), and `several_steps` (a script's loop may step on a batch several
times, each time for other groups). `runtime.kinds` has the table of the machines and hosts that carry each out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from squall.checks import require, require_one_of
from squall.protocol.exchanges import Exchanges
from squall.protocol.sandblaster.method import MethodSettings
from squall.task import OptimizerFactory


@dataclass(frozen=True, kw_only=True)
class Update:
    """What a shard's numbers do with a push.

    Attributes:
        optimizer: factory of the shards' optimizer.
        elementwise: it moves every element by itself, so that shards may cut tensors anywhere.
        compensation: lambda of the correction of stale gradients, times gradient^2 x (weights now - weights that it was
            computed on); None: no correction.
        adaptive: decay of the running mean of gradient^2 whose root divides lambda; None keeps lambda constant.
        blocks: equal parts of the vector that take turns.
        block_order: "cyclic", or "random": another order in every sweep.
    """

    optimizer: OptimizerFactory
    elementwise: bool = True
    compensation: float | None = None
    adaptive: float | None = None
    blocks: int = 1
    block_order: str = "cyclic"


@dataclass(frozen=True, kw_only=True)
class Local:
    """What a replica does that trains on weights of its own between exchanges.

    Attributes:
        optimizer: factory of the optimizer that moves them.
        pushes: the "delta" (fetched weights - own weights), or its "weights" (the shards' gradient is then their own
            weights - the pushed ones).
        pull: how far a fetch moves its weights towards the shards'; 1 replaces them.
    """

    optimizer: OptimizerFactory
    pushes: str
    pull: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Batch after batch: compute, push, update, fetch. All data-parallel algorithms are settings of it.

    Attributes:
        update: what shards do with a push.
        exchanges: when replicas exchange, and who waits for whom.
        local: what replicas do in between, where they train on weights of their own.
        alone: one replica and its shard in the calling process, without a protocol; the numbers are the same.
    """

    converges: ClassVar[bool] = False

    update: Update
    exchanges: Exchanges = field(default_factory=Exchanges)
    local: Local | None = None
    alone: bool = False

    @property
    def tuned(self) -> OptimizerFactory:
        """The optimizer that the task's param groups and schedule are for, and a user chooses the rate of."""
        return self.local.optimizer if self.local is not None else self.update.optimizer

    @property
    def every(self) -> int:
        return self.exchanges.cadence.push_every

    @property
    def blocks(self) -> int:
        return self.update.blocks

    @property
    def buffers(self) -> int:
        return 2 if self.exchanges.cadence.overlap else 1

    @property
    def several_steps(self) -> bool:
        """Where every push is an update of its own."""
        cadence, rules = self.exchanges.cadence, self.exchanges.rules
        every = cadence.push_every == cadence.fetch_every == self.blocks == 1
        return rules.gather == "each" and every and not cadence.overlap and self.local is None

    def check(self, replicas: int, shards: int) -> None:
        """Raise a `ValueError` with the remedy for settings that cannot be."""
        cadence, rules, update = self.exchanges.cadence, self.exchanges.rules, self.update
        counts = {"push_every": cadence.push_every, "fetch_every": cadence.fetch_every, "blocks": update.blocks}
        for name, count in counts.items():
            require(name, count, count >= 1, "at least 1")
        known = rules.max_delay is None or rules.max_delay >= 0
        require("max_delay", rules.max_delay, known, "0 or more, or None for no bound")
        warm_start = self.exchanges.dealing.warm_start
        require("warm_start", warm_start, warm_start >= 0, "0 or more examples")
        if not 0 <= rules.backup < replicas:
            raise ValueError(f"backup is {rules.backup} of {replicas} replicas: a round needs at least one push")
        if shards > 1 and not rules.waits_for_all:
            raise ValueError(
                f"{shards} shards with rounds that do not wait for all: shards would not agree on who was late,"
                " use shards=1"
            )
        require("grace", rules.grace, math.isfinite(rules.grace) and rules.grace >= 0, "0 or more")
        if rules.quorum is not None and not 1 <= rules.quorum <= replicas:
            raise ValueError(f"quorum is {rules.quorum} of {replicas} replicas: it must be from 1 to {replicas}")
        require_one_of("gather", rules.gather, ("each", "mean"))
        require_one_of("late", rules.late, ("drop", "fold"))
        require_one_of("block_order", update.block_order, ("cyclic", "random"))
        self._check_numbers()

    def _check_numbers(self) -> None:
        cadence, update, local = self.exchanges.cadence, self.update, self.local
        known = update.compensation is None or update.compensation >= 0
        require("compensation", update.compensation, known, "0 or more")
        if update.adaptive is not None and not 0 <= update.adaptive < 1:
            raise ValueError(f"adaptive is {update.adaptive}: a decay is 0 or more and below 1, or None")
        each = self.exchanges.rules.gather == "each" and cadence.fetch_every == 1
        if update.compensation is not None and (cadence.overlap or not each):
            raise ValueError(
                "staleness='compensate' needs the weights that a gradient was computed on: no overlap,"
                " and a fetch for every push"
            )
        if cadence.local != (local is not None):
            raise ValueError("a replica has an optimizer of its own where its cadence is local, and only there")
        if local is not None and cadence.overlap:
            raise ValueError("a replica with an optimizer of its own cannot overlap: leave overlap out")
        if local is not None:
            require_one_of("pushes", local.pushes, ("delta", "weights"))
        for factory in (update.optimizer, local.optimizer if local is not None else update.optimizer):
            _check_factory(factory)


@dataclass(frozen=True, kw_only=True)
class BatchMethod:
    """A method that looks at a batch as a whole, in place of the loop.

    Attributes:
        rules: of the method.
        examples: of a batch; None, or more than there are: the whole training set.
        portions: that a batch is cut into; None: `Task.batch_size` examples each, and one a replica at least.
        push_every: portions that a replica sums before it pushes.
        backup: late portions are also given to idle replicas.
    """

    blocks: ClassVar[int] = 1
    buffers: ClassVar[int] = 1
    local: ClassVar[Local | None] = None
    several_steps: ClassVar[bool] = False

    rules: MethodSettings
    examples: int | None
    portions: int | None
    push_every: int
    backup: bool

    @property
    def every(self) -> int:
        return self.push_every

    @property
    def converges(self) -> bool:
        return self.examples is None

    def batch(self, examples: int) -> int:
        """Examples of a batch, of a training set that has so many."""
        return min(self.examples or examples, examples)

    def size(self, batch_size: int, examples: int, replicas: int) -> int:
        """Examples of a portion."""
        batch = self.batch(examples)
        return min(batch_size, max(1, batch // replicas)) if self.portions is None else -(-batch // self.portions)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Batch after batch in lock-step, without shards: replicas reduce their gradients among themselves.

    Attributes:
        optimizer: factory of the optimizer that every replica has, of its whole model.
        shard_optimizer: each steps on its share of the parameters, and on the share before, and has the state of these.
    """

    blocks: ClassVar[int] = 1
    buffers: ClassVar[int] = 0
    converges: ClassVar[bool] = False
    every: ClassVar[int] = 1
    local: ClassVar[Local | None] = None
    several_steps: ClassVar[bool] = False

    optimizer: OptimizerFactory
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        _check_factory(self.optimizer)

    @property
    def tuned(self) -> OptimizerFactory:
        return self.optimizer


def ring_share(members: int) -> float:
    """Of a vector, what each member of a ring sends, and receives, so that all have the sum of theirs."""
    return 2 * (members - 1) / members


@dataclass(frozen=True, kw_only=True)
class Answering:
    """The outputs of a model for each example once: nothing is trained, and no weights move."""

    blocks: ClassVar[int] = 1
    buffers: ClassVar[int] = 0
    converges: ClassVar[bool] = False
    every: ClassVar[int] = 1
    local: ClassVar[Local | None] = None
    several_steps: ClassVar[bool] = False


Work = Loop | BatchMethod | Collective | Answering


def _check_factory(factory: object) -> None:
    if not callable(factory):
        raise ValueError("optimizer must be a factory, for example partial(torch.optim.SGD, lr=0.1)")
