"""Sandblaster's coordinator: the method's requests to shards, and portions of a batch to replicas.

It sees dot products and losses, never a parameter (Dean et al. 2012, algorithm 2).
"""

from __future__ import annotations

import math
from collections import Counter, deque

import msgspec

from squall.protocol.closing import Phase
from squall.protocol.coordinator import Coordinator
from squall.protocol.effects import Cause, Effect, Send
from squall.protocol.frames import Message
from squall.protocol.leases import Limits
from squall.protocol.ledger import Range
from squall.protocol.membership import Covers
from squall.protocol.messages import Left, Progress
from squall.protocol.nodes import Node
from squall.protocol.notes import IterationDone, Remark
from squall.protocol.policy import Policy
from squall.protocol.sandblaster.messages import (
    Calculated,
    Calculation,
    Combine,
    Portion,
    PortionRequest,
    PortionsTaken,
)
from squall.protocol.sandblaster.method import (
    Calculate,
    EvaluateTrial,
    Failed,
    Iterated,
    MethodSettings,
    MethodState,
    Outcome,
    Proceed,
    Request,
    minimize,
)
from squall.protocol.sandblaster.portions import Balance, Portions


class BatchOrder:
    """Which examples each iteration is on. Numbers past an epoch's last whole batch are of the next epoch."""

    def __init__(self, examples: int, batch: int | None) -> None:
        self.examples = examples
        self.batch = batch  # examples; None: all of them, in every iteration

    def range(self, number: int) -> Range:
        if self.batch is None:
            return Range(0, 0, self.examples)
        epoch, place = divmod(number, self.examples // self.batch)
        return Range(epoch, place * self.batch, (place + 1) * self.batch)


class BatchCoordinator(Coordinator):
    def __init__(
        self, policy: Policy, rules: MethodSettings, balance: Balance, batches: BatchOrder, limits: Limits,
        state: MethodState | None = None, trained: int = 0, snapshots: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(policy, snapshots)
        self.rules = rules
        self.balance = balance
        self.batches = batches
        self.limits = limits
        self.state = state or MethodState()
        self.portions: Portions | None = None  # of the evaluation under way, once it is open
        self.evaluation = 0  # its number; never used again
        self._trained = trained
        self._method = minimize(self.state, rules)
        self._request: Request | None = None  # that is being answered
        self._number = 0  # of the last calculation
        self._answers: dict[Node, tuple[float, ...]] = {}  # to it
        self._unpushed: dict[Node, int] = {}  # replica -> portions kept, and not told to be pushed
        self._taken: Counter[int] = Counter()  # portion -> shards that have it
        self._idle: dict[Node, None] = {}  # replicas that wait for a portion
        self._took_s: deque[float] = deque(maxlen=32)  # by the last portions
        self._late_at: float | None = None  # when an idle replica may back up somebody
        self._evaluated_at = self.state.iteration  # the last one whose weights were to be measured
        self._nonfinite = ""  # the portion whose loss or gradient was no number
        self._ended: tuple[Cause, str] | None = None  # why the method did

    @property
    def wake_at(self) -> float | None:
        times = (super().wake_at, self._late_at if self.phase is Phase.RUNNING else None)
        return min((t for t in times if t is not None), default=None)

    def _on_time(self, now: float, effects: list[Effect]) -> None:
        super()._on_time(now, effects)
        self._proceed(now, effects)

    @property
    def trained(self) -> int:
        return self._trained

    # ------------------------------------------------------------ what the base asks

    def _on_work(self, sender: Node, message: Message, now: float, effects: list[Effect]) -> None:
        match message:
            case Calculated(number, values):
                self._on_calculated(sender, number, values, now, effects)
            case PortionRequest():
                if sender in self.members.live:
                    self._on_request(sender, message, now, effects)
            case PortionsTaken(evaluation, portions):
                if self._is_open(evaluation):
                    self._on_taken(portions, now, effects)
            case Progress(_, stats) | Left(_, stats):
                self._note_stats(sender, stats, effects)
            case _:
                raise AssertionError(f"the coordinator does not know {message!r}")

    def _proceed(self, now: float, effects: list[Effect]) -> None:
        self._late_at = None
        if self.phase is not Phase.RUNNING or not self.members.live:
            return
        if self._request is None:
            self._advance(None, now, effects)
        elif self.portions is not None and self.portions.complete:
            self._evaluated(now, effects)
        for node in list(self._idle):
            self._give(node, keep=False, now=now, effects=effects)

    def _take_back(self, node: Node, applied: list[Covers], effects: list[Effect]) -> None:
        """What only some shards have of it spoils the sum: the evaluation is begun anew."""
        if self.portions is None:
            return
        has = [{portion for portion, evaluation in of.items() if evaluation == self.evaluation} for of in applied]
        everywhere = set.intersection(*has) if len(has) == self.policy.shards else set()
        if set.union(set(), *has) - everywhere:
            self._evaluate(effects)
            return
        self.portions.applied(tuple(sorted(everywhere)))
        self.portions.lose(node)

    def _forget(self, node: Node) -> None:
        self._idle.pop(node, None)
        self._unpushed.pop(node, None)

    def _over(self) -> tuple[Cause, str] | None:
        return self._ended

    def _ledger(self) -> dict[str, object]:
        method = msgspec.to_builtins(self.state)
        if self.rules.sampled:
            method["loss"] = None  # of a batch that does not come again
        return {"examples": self.batches.examples, "trained": self._trained, "method": method}

    # ------------------------------------------------------------ the method

    def _advance(self, answer: tuple[float, ...] | None, now: float, effects: list[Effect]) -> None:
        """Give the method its answer, and see to what it asks next."""
        while True:
            try:
                request = next(self._method) if answer is None else self._method.send(answer)
            except StopIteration as over:
                self._method_ended(over.value, now, effects)
                return
            self._request = request
            match request:
                case Calculate(combine, rows, columns, largest):
                    self._calculate(combine, rows, columns, largest, None, effects)
                    return
                case EvaluateTrial():
                    self._evaluate(effects)
                    return
                case Proceed():
                    answer = (self._may_proceed(effects),)
                case Iterated(loss):
                    effects.append(IterationDone(self.state.iteration, loss, self.trained))
                    answer = ()
                case Failed(text):
                    effects.append(Remark("warning", text))
                    answer = ()

    def _method_ended(self, ended: Outcome, now: float, effects: list[Effect]) -> None:
        self._ended = self._ended or (Cause.METHOD, ended.reason)
        if ended.failed:
            self._failure, self.error = "nonfinite", f"{ended.reason}: NaN or Inf in {self._nonfinite}"
            self._hurry(ended.reason, now, effects)
        else:
            self._stop(*self._ended, now, effects)

    def _calculate(
        self, combine: tuple[Combine, ...], rows: tuple[str, ...], columns: tuple[str, ...],
        largest: tuple[str, ...], opens: int | None, effects: list[Effect],
    ) -> None:  # fmt: skip
        self._number += 1
        self._answers = {}
        message = Calculation(self._number, combine, rows, columns, largest, opens, self._trained)
        effects.extend(Send(shard, message) for shard in self._shards)

    def _evaluate(self, effects: list[Effect]) -> None:
        """Have the shards open a new evaluation; portions are given when all have."""
        assert isinstance(self._request, EvaluateTrial)
        self.portions = None
        self._taken.clear()
        self._unpushed.clear()
        self.evaluation += 1
        self._calculate(self._request.combine, (), (), (), self.evaluation, effects)

    def _on_calculated(
        self, shard: Node, number: int, values: tuple[float, ...], now: float, effects: list[Effect]
    ) -> None:
        if number != self._number or self.phase is not Phase.RUNNING:
            return  # of an evaluation that was begun anew
        self._answers[shard] = values
        if len(self._answers) < len(self._shards):
            return
        if isinstance(self._request, EvaluateTrial):
            self.portions = Portions(self.batches.range(self._request.batch), self.balance, self._took_s)
            self._proceed(now, effects)
            return
        assert isinstance(self._request, Calculate)
        by_shard = zip(*(self._answers[shard] for shard in self._shards))
        dots = len(self._request.rows) * len(self._request.columns)
        answer = tuple(sum(of) if i < dots else max(of) for i, of in enumerate(by_shard))
        self._advance(answer, now, effects)

    def _may_proceed(self, effects: list[Effect]) -> float:
        """1.0 to go on, 0.0 at a limit."""
        number, limits = self.state.iteration, self.limits
        if self.policy.evaluate and number > self._evaluated_at:
            self._evaluated_at = number
            self._evaluations.ask(effects)
        if limits.steps is not None and number >= limits.steps:
            self._ended = Cause.STEPS, f"{number} iterations are done"
        elif limits.epochs is not None and self.trained >= limits.epochs * self.batches.examples:
            self._ended = Cause.DATA, "all data is trained"
        return 0.0 if self._ended else 1.0

    # ------------------------------------------------------------ portions

    def _is_open(self, evaluation: int) -> bool:
        return self.portions is not None and evaluation == self.evaluation

    def _on_request(self, node: Node, asked: PortionRequest, now: float, effects: list[Effect]) -> None:
        if self.phase is not Phase.RUNNING:
            return  # Stop is on its way
        keep = False
        if asked.done >= 0:
            self._replacing.fruitful(node)
        if asked.done >= 0 and self._is_open(asked.evaluation):
            assert self.portions is not None
            if asked.finite:
                keep = self.portions.done(node, asked.done, asked.loss, now)
                self._unpushed[node] = self._unpushed.get(node, 0) + keep
            else:
                range_ = self.portions.ranges[asked.done]
                self._nonfinite = f"examples {range_.start} to {range_.stop} of epoch {range_.epoch}"
                self._give_up(now, effects)
        self._give(node, keep, now, effects)

    def _give_up(self, now: float, effects: list[Effect]) -> None:
        """The loss is no number at the trial weights: the line search must step shorter."""
        self.portions = None
        self._advance((math.inf,), now, effects)

    def _give(self, node: Node, keep: bool, now: float, effects: list[Effect]) -> None:
        """Tell a replica what to do with what it computed, and what to compute next."""
        portions = self.portions
        if portions is None:
            self._idle[node] = None
            return
        number = portions.give(node, now)
        kept = self._unpushed.get(node, 0)
        push = kept > 0 and (number is None or portions.may_be_last(node) or kept >= self.balance.push_every)
        if push:
            self._unpushed[node] = 0
        if number is None:
            self._idle[node] = None
            late_at = min(portions.late_at(node), self._late_at if self._late_at is not None else math.inf)
            self._late_at = late_at if late_at < math.inf else None
            if keep or push:
                effects.append(Send(node, Portion(self.evaluation, keep, push)))
            return
        self._idle.pop(node, None)
        epoch, start, stop = portions.ranges[number]
        share = portions.share(number)
        effects.append(Send(node, Portion(self.evaluation, keep, push, number, epoch, start, stop, share)))

    def _on_taken(self, portions: tuple[int, ...], now: float, effects: list[Effect]) -> None:
        assert self.portions is not None
        self._taken.update(portions)
        self.portions.applied(tuple(p for p in portions if self._taken[p] == len(self._shards)))
        if self.portions.complete:
            self._evaluated(now, effects)

    def _evaluated(self, now: float, effects: list[Effect]) -> None:
        """Every shard has the whole batch's gradient."""
        assert self.portions is not None
        if self.phase is not Phase.RUNNING:
            return
        loss, self._trained = self.portions.loss, self._trained + self.portions.examples
        for node, stats in self.portions.work():
            self._note_stats(node, stats, effects)
        self.portions = None
        self._advance((loss,), now, effects)
