"""What the auditor keeps: of pushes, of shards, and of what is in the weights that are measured (I7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from squall.protocol.effects import Compute, Transmit
from squall.protocol.events import GradientComputed
from squall.protocol.messages import Evaluated, Exchange, Logged
from squall.protocol.nodes import Node
from squall.protocol.notes import WeightsMeasured
from squall.sim.proof.memory import Gradient, Written, folded

Label = tuple[int, int]  # updates and examples, each by the shard that has fewest


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
        self._gradients: list[list[Gradient]] = []  # of each update, that are in the numbers
        self._behind = 0  # place of what the next update is made on: the last, unless it has gone back

    @property
    def version(self) -> int:
        return self.first + len(self.pushers)

    def add(self, pushes: Sequence[SentPush], weights: Sequence[float]) -> None:
        """An update."""
        gradients = [gradient for push in pushes for gradient in push.gradients]
        trained = sum(gradient.stop - gradient.start for gradient in gradients if not gradient.further)
        update = [(push.gradients, weight) for push, weight in zip(pushes, weights)]
        self.folds.append(folded(self.folds[self._behind], update))
        self.examples.append(self.examples[self._behind] + trained)
        self.pushers.append(tuple(push.node for push in pushes))
        self._gradients.append(gradients)
        self._behind = len(self.pushers)

    def back_to(self, version: int) -> list[Gradient]:
        """It goes on from that version. Returns what the updates since have brought, which it has no more."""
        self._behind = version - self.first
        lost = [gradient for gradients in self._gradients[self._behind :] for gradient in gradients]
        self._gradients[self._behind :] = [[] for _ in self._gradients[self._behind :]]
        return lost

    def written(self, version: int) -> Written:
        return Written(version, self.folds[version - self.first])

    def examples_at(self, version: int) -> int:
        return self.examples[version - self.first]


class Labels:
    """Keeps what is in everybody's weights. `wrong` compares what is told of them."""

    def __init__(self, logs: Sequence[ShardLog], local: bool) -> None:
        """`logs` are by shard; `local`: every batch moves the replica's weights."""
        self._logs, self._local = logs, local
        self._in_use: dict[Node, Label] = {}
        self._stepping: dict[Node, Compute] = {}  # computations that will move a replica's own weights
        self._told: set[Label] = set()

    def used(self, node: Node, versions: Mapping[int, int]) -> None:
        """The node goes on with weights of these versions, by shard."""
        examples = min(self._logs[shard].examples_at(version) for shard, version in versions.items())
        self._in_use[node] = min(versions.values()), examples

    def wrong(self, node: Node, what: object) -> str:
        """What is wrong with what is seen of a node, or nothing."""
        match what:
            case Compute(local_step=steps):
                self._stepping.pop(node, None)
                if steps or self._local:
                    self._stepping[node] = what
            case GradientComputed(finite=True) if node in self._stepping:
                own = self._stepping.pop(node)
                updates, examples = self._in_use[node]
                self._in_use[node] = updates, examples + own.stop - own.start
            case Transmit(again=False) if isinstance(what.frame.message, Evaluated | Logged):
                weights = what.frame.message.weights
                label, right = (weights.updates, weights.examples), self._in_use.get(node, (0, 0))
                self._told.add(label)
                if label != right:
                    return f"{node} tells updates, examples {label} of weights with {right}"
            case WeightsMeasured(values, weights):
                label = weights.updates, weights.examples
                if label not in self._told:
                    names = ", ".join(values)
                    return f"the record labels {names} with updates, examples {label}, and nobody has told that"
        return ""
