"""Which replica computes which portion of the evaluation under way, and when it is to push what it has."""

from __future__ import annotations

import math
from collections import deque

from squall.protocol.effects import Effect, Send
from squall.protocol.ledger import Range
from squall.protocol.machine import Refusal
from squall.protocol.membership import Applied
from squall.protocol.nodes import Node
from squall.protocol.sandblaster.messages import Portion, PortionRequest
from squall.protocol.sandblaster.portions import Balance, Portions


class PortionDealer:
    def __init__(self, balance: Balance, shards: int) -> None:
        self.evaluation = 0  # its number; never used again
        self.portions: Portions | None = None  # of the evaluation under way, once all shards have opened it
        self.late_at: float | None = None  # when an idle replica may compute a portion that another one is late with
        self._balance = balance
        self._shards = shards
        self._given: dict[Node, tuple[int, int]] = {}  # replica -> evaluation and portion that it has to compute
        self._unpushed: dict[Node, int] = {}  # replica -> portions that it keeps and was not told to push
        self._taken: dict[int, set[Node]] = {}  # portion -> shards that have it
        self._idle: dict[Node, None] = {}  # replicas that wait for a portion
        self._took_s: deque[float] = deque(maxlen=32)  # how long the last portions took

    @property
    def complete(self) -> bool:
        """Every shard has the whole batch's gradient."""
        return self.portions is not None and self.portions.complete

    def is_open(self, evaluation: int) -> bool:
        return self.portions is not None and evaluation == self.evaluation

    def begin(self) -> None:
        """Another evaluation, or the same anew: nothing is dealt before all shards have opened it."""
        self.portions = None
        self._taken.clear()
        self._unpushed.clear()
        self.evaluation += 1

    def open(self, batch: Range) -> None:
        self.portions = Portions(batch, self._balance, self._took_s)

    def check(self, node: Node, asked: PortionRequest) -> None:
        """Raises `Refusal` where the replica has not computed what it was given."""
        if (asked.evaluation, asked.done) != self._given.get(node, (0, -1)):
            raise Refusal(f"portion {asked.done} of evaluation {asked.evaluation} was not given to it")
        self._given.pop(node, None)

    def done(self, node: Node, asked: PortionRequest, now: float) -> bool:
        """A replica has computed a portion of the open evaluation; True if its gradient counts."""
        assert self.portions is not None
        keep = self.portions.done(node, asked.done, asked.loss, now)
        self._unpushed[node] = self._unpushed.get(node, 0) + keep
        return keep

    def deal_to_idle(self, now: float, effects: list[Effect]) -> None:
        for node in list(self._idle):
            self.deal(node, False, now, effects)

    def deal(self, node: Node, keep: bool, now: float, effects: list[Effect]) -> None:
        """Tell a replica what to do with what it computed, and what to compute next."""
        portions = self.portions
        if portions is None:
            self._idle[node] = None
            return
        number = portions.give(node, now)
        kept = self._unpushed.get(node, 0)
        push = kept > 0 and (number is None or portions.may_be_last(node) or kept >= self._balance.push_every)
        if push:
            self._unpushed[node] = 0
        if number is None:
            self._idle[node] = None
            late_at = min(portions.late_at(node), self.late_at if self.late_at is not None else math.inf)
            self.late_at = late_at if late_at < math.inf else None
            if keep or push:
                effects.append(Send(node, Portion(self.evaluation, keep, push)))
            return
        self._idle.pop(node, None)
        self._given[node] = self.evaluation, number
        epoch, start, stop = portions.ranges[number]
        share = portions.share(number)
        effects.append(Send(node, Portion(self.evaluation, keep, push, number, epoch, start, stop, share)))

    def taken(self, shard: Node, portions: tuple[int, ...]) -> None:
        """A shard has these in its sum. What nobody keeps counts for nothing, whoever has pushed it there."""
        assert self.portions is not None
        kept = [portion for portion in portions if self.portions.is_kept(portion)]
        for portion in kept:
            self._taken.setdefault(portion, set()).add(shard)
        self.portions.applied(tuple(p for p in kept if len(self._taken[p]) == self._shards))

    def forget(self, node: Node) -> None:
        self._idle.pop(node, None)
        self._unpushed.pop(node, None)
        self._given.pop(node, None)

    def take_back(self, node: Node, applied: list[Applied]) -> bool:
        """Deal anew what a replica had that is gone; False if only some shards have a push of it: the sum is spoilt."""
        if self.portions is None:
            return True
        has = [{portion for portion, evaluation in of.items() if evaluation == self.evaluation} for of in applied]
        everywhere = set.intersection(*has) if len(has) == self._shards else set()
        if set.union(set(), *has) - everywhere:
            return False
        self.portions.applied(tuple(sorted(everywhere)))
        self.portions.lose(node)
        return True
