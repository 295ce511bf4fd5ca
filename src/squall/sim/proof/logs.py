"""What the auditor keeps of pushes and of shards."""

from __future__ import annotations

from squall.protocol.messages import Exchange
from squall.protocol.nodes import Node
from squall.sim.proof.memory import Gradient, Written


class SentPush:
    """A push as it was sent."""

    def __init__(self, node: Node, exchange: Exchange, gradients: tuple[Gradient, ...]) -> None:
        self.node = node
        self.exchange = exchange
        self.gradients = gradients
        self.staleness: dict[int, int] = {}  # shard -> with which it was applied there


class ShardLog:
    """What one shard has applied in this life."""

    def __init__(self, written: Written, examples: int) -> None:
        self.first = written.version
        self.folds = [written.fold]  # before and after each update
        self.examples = [examples]  # trained, in the same way
        self.pushers: list[tuple[Node, ...]] = []  # of each update

    @property
    def version(self) -> int:
        return self.first + len(self.pushers)

    def written(self, version: int) -> Written:
        return Written(version, self.folds[version - self.first])

    def examples_at(self, version: int) -> int:
        return self.examples[version - self.first]
