"""Downpour SGD: asynchronous replicas around sharded parameter servers."""

from __future__ import annotations

from dataclasses import dataclass

from squall.protocol.exchanges import Cadence, Dealing, Exchanges, Rules
from squall.strategies.base import Distributed, default_optimizer
from squall.strategies.work import Loop, Update
from squall.task import OptimizerFactory


@dataclass(frozen=True, kw_only=True)
class Downpour(Distributed):
    """Replicas push gradients and fetch weights at their own pace; the shards apply each push as it comes.

    A push is the sum of the gradients of the last `push_every` batches; between fetches a replica moves its own
    weights by SGD with the shards' learning rate.

    Args:
        replicas: processes that compute gradients.
        shards: server processes that own the parameters.
        optimizer: factory of any elementwise `torch.optim` optimizer, run on the shards. Adagrad is the paper's
            choice: its per-parameter rates make staleness harmless where a fixed rate diverges.
        push_every: batches between pushes (n_push).
        fetch_every: batches between fetches (n_fetch).
        warm_start: examples that one replica trains alone before the others join in.
        max_delay: exchanges that a replica may be ahead of the slowest; None for no bound.
        overlap: compute the next gradient while the last one is exchanged, at one update more of staleness.

    Example:
        >>> from functools import partial
        >>> import squall, torch
        >>> squall.Downpour(optimizer=partial(torch.optim.Adagrad, lr=0.02)).recipe().loop.exchanges.awaited
        False

    Source: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1 and algorithm 1.

    Not to be used when a run must equal single-process training step by step (`Synchronous` does), or with a fixed
    rate near the largest stable one: staleness lowers that limit.
    """

    optimizer: OptimizerFactory = default_optimizer
    push_every: int = 1
    fetch_every: int = 1
    warm_start: int = 0
    max_delay: int | None = None
    overlap: bool = False

    def work(self) -> Loop:
        exchanges = Exchanges(
            Cadence(self.push_every, self.fetch_every, self.overlap), Rules(max_delay=self.max_delay),
            Dealing(self.warm_start),
        )  # fmt: skip
        return Loop(update=Update(optimizer=self.optimizer), exchanges=exchanges)
