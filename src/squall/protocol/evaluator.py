"""The evaluator's machine: on request, fetch the shards' weights and have them evaluated. It never pushes."""

from __future__ import annotations

import sys

from squall.protocol.core import (
    COORDINATOR,
    Effect,
    End,
    EvaluateModel,
    Event,
    Forget,
    MessageArrived,
    ModelEvaluated,
    Node,
    Send,
    Started,
    TimePassed,
)
from squall.protocol.messages import Evaluate, Evaluated, Exchange, Exchanged, Join, Stop, Weights

BUFFER = 0


def predecessors(evaluator: Node, known: int) -> list[Effect]:
    """For a shard that hears from this evaluator, and has known incarnation `known`: those before it are dead.

    What they asked for and comes late would be written over weights that are being evaluated.
    """
    return [Forget(Node("evaluator", evaluator.index, older)) for older in range(known, evaluator.incarnation)]


class Evaluator:
    def __init__(self, node: Node, shards: int, pid: int = 0) -> None:
        self.node = node
        self.pid = pid
        self._shards = [Node("shard", i) for i in range(shards)]
        self._number: int | None = None  # of the evaluation under way
        self._awaited: dict[Node, None] = {}
        self._updates = self._examples = 0  # in the weights, by the shard that has applied least
        self._fetched_at = 0.0

    @property
    def wake_at(self) -> float | None:
        return None

    def on(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started():
                return [Send(COORDINATOR, Join(self.pid))]
            case MessageArrived(_, Evaluate(number)):
                self._number = number
                self._awaited = dict.fromkeys(self._shards)
                self._updates = self._examples = sys.maxsize
                return [Send(shard, Exchange(0, weights=BUFFER)) for shard in self._shards]
            case MessageArrived(sender, Exchanged() as answer):
                self._updates = min(self._updates, answer.version)
                self._examples = min(self._examples, answer.examples)
                self._fetched_at = now
                self._awaited.pop(sender, None)
                return [] if self._awaited else [EvaluateModel(BUFFER)]
            case ModelEvaluated(values):
                assert self._number is not None
                weights = Weights(self._updates, self._examples, now - self._fetched_at)
                return [Send(COORDINATOR, Evaluated(self._number, weights, values))]
            case MessageArrived(_, Stop()):
                return [End("finished")]
            case TimePassed():
                return []
        raise AssertionError(f"{self.node} does not know {event!r}")
