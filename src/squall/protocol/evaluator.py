"""The evaluator's machine: on request, fetch the shards' weights and have them evaluated. It never pushes."""

from __future__ import annotations

import math
import sys

from squall.protocol.best import better
from squall.protocol.effects import Effect, End, EvaluateModel, KeepWeights, Send
from squall.protocol.events import Event, MessageArrived, ModelEvaluated, Started, TimePassed, WeightsKept
from squall.protocol.machine import Refusal
from squall.protocol.messages import Evaluate, Evaluated, Exchange, Exchanged, Join, Stop, Weights
from squall.protocol.nodes import COORDINATOR, Node

BUFFER = 0


class Evaluator:
    """`keep` is the metric whose best weights are kept; "" where none is."""

    wake_at: float | None = None

    def __init__(self, node: Node, shards: int, pid: int = 0, keep: str = "") -> None:
        self.node = node
        self._keep = keep
        self.pid = pid
        self._shards = [Node("shard", i) for i in range(shards)]
        self._number: int | None = None  # of the evaluation under way
        self._awaited: dict[Node, None] = {}
        self._updates = self._examples = 0  # in the weights, by the shard that has applied least
        self._fetched_at = 0.0
        self._best: float | None = None  # of all evaluations before, as the coordinator knows them
        self._values: dict[str, float] = {}

    def on(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started():
                return [Send(COORDINATOR, Join(self.pid))]
            case MessageArrived(_, Evaluate(number, best, weights)):
                self._number, self._best = number, best
                if weights is not None:
                    self._updates, self._examples, self._fetched_at = weights.updates, weights.examples, now
                    return [EvaluateModel(BUFFER)]
                self._awaited = dict.fromkeys(self._shards)
                self._updates = self._examples = sys.maxsize
                return [Send(shard, Exchange(0, weights=BUFFER)) for shard in self._shards]
            case MessageArrived(sender, Exchanged() as answer):
                if sender not in self._awaited:
                    raise Refusal("it answers, and nothing was asked")
                self._updates = min(self._updates, answer.version)
                self._examples = min(self._examples, answer.examples)
                self._fetched_at = now
                del self._awaited[sender]
                return [] if self._awaited else [EvaluateModel(BUFFER)]
            case ModelEvaluated(values):
                self._values = values
                value = values.get(self._keep, math.nan)
                if better(self._keep, value, self._best):  # before it is told: what the record calls best is kept
                    return [KeepWeights(BUFFER, self._keep, value, self._updates, self._examples)]
                return [self._answer("", now)]
            case WeightsKept(error):
                return [self._answer(error, now)]
            case MessageArrived(_, Stop()):
                return [End("finished")]
            case TimePassed():
                return []
        raise AssertionError(f"{self.node} does not know {event!r}")

    def _answer(self, error: str, now: float) -> Effect:
        assert self._number is not None
        weights = Weights(self._updates, self._examples, now - self._fetched_at)
        return Send(COORDINATOR, Evaluated(self._number, weights, self._values, error))
