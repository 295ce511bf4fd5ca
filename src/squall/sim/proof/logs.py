"""What the auditor keeps: of pushes, of shards, and of what is in the weights that are measured (I7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from squall.protocol.effects import Apply, Compute, Transmit
from squall.protocol.events import GradientComputed
from squall.protocol.messages import Evaluated, Exchange, Logged
from squall.protocol.nodes import Node
from squall.protocol.notes import WeightsMeasured
from squall.sim.proof.loops import mean_rates
from squall.sim.proof.memory import BatchRange, Gradient, Written, folded
from squall.strategies.base import Recipe

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
        self._pushes: list[Sequence[SentPush]] = []  # the same
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
        self._pushes.append(pushes)
        self._gradients.append(gradients)
        self._behind = len(self.pushers)

    def back_to(self, version: int) -> list[Gradient]:
        """It goes on from that version. Returns what the updates since have brought, which it has no more."""
        self._behind = version - self.first
        lost = [gradient for gradients in self._gradients[self._behind :] for gradient in gradients]
        self._gradients[self._behind :] = [[] for _ in self._gradients[self._behind :]]
        return lost

    def only(self, version: int, shard: int) -> list[Gradient]:
        """There are no later updates, of which nobody has heard. Returns what they had brought."""
        count = version - self.first
        lost = [gradient for gradients in self._gradients[count:] for gradient in gradients]
        for push in [push for pushes in self._pushes[count:] for push in pushes]:
            del push.staleness[shard]
        if count < len(self.pushers):
            self._behind = count
        for kept, behind in ((self.folds, 1), (self.examples, 1), (self.pushers, 0), (self._pushes, 0)):
            del kept[count + behind :]
        del self._gradients[count:]
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


def bound(recipe: Recipe) -> tuple[int, int] | None:
    """Updates of its own, and of each other process, that an applied push may be behind; None: any number.

    See `protocol.shard` for where the numbers come from. A late push that a round folds in may be behind any number.
    """
    cadence, rules = recipe.loop.exchanges.cadence, recipe.loop.exchanges.rules
    if rules.gather == "mean":
        return None if rules.late == "fold" and not rules.waits_for_all else (0, 0)
    if rules.max_delay is None or cadence.push_every % cadence.fetch_every:
        return None
    return (1, 2 * (rules.max_delay + 1)) if cadence.overlap else (0, 2 * rules.max_delay + 1)


def wrong_weights(apply: Apply, pushes: Sequence[SentPush], gather: str) -> str:
    """What is wrong with how an update weighs its pushes, and at which rates it is made; or nothing."""
    right = [1.0]
    if gather != "each":
        total = sum(push.exchange.examples for push in pushes)
        right = [push.exchange.examples / total for push in pushes]
    if [term.weight for term in apply.terms] != right:
        return f"weighs an update as {apply.terms}, and its pushes are {right}"
    wanted = mean_rates([(push.gradients[-1].factors, push.exchange.examples) for push in pushes])
    if apply.factors != wanted:
        return f"steps at {apply.factors}, and the loops behind it want {wanted}"
    return ""


def text(batch: BatchRange) -> str:
    return "examples {1} to {2} of epoch {0}".format(*batch)


def numbers(gradients: Sequence[Gradient]) -> str:
    return f"computations {[gradient.number for gradient in gradients]}"
