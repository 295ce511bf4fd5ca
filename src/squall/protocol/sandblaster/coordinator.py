"""Sandblaster's coordinator: it passes the method's requests on to shards and replicas, and their answers back.

It sees dot products and losses, never a parameter (Dean et al. 2012, algorithm 2). Portions are dealt in `dealing`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from squall.protocol.closing import Phase
from squall.protocol.coordinator import Coordinator
from squall.protocol.effects import Cause, Effect, Send
from squall.protocol.frames import Message
from squall.protocol.leases import Limits
from squall.protocol.ledger import Range, size
from squall.protocol.machine import Refusal
from squall.protocol.membership import Applied
from squall.protocol.messages import Left, Progress
from squall.protocol.nodes import Node
from squall.protocol.notes import IterationDone, Remark
from squall.protocol.policy import Policy
from squall.protocol.sandblaster.dealing import PortionDealer
from squall.protocol.sandblaster.messages import Calculated, Calculation, PortionRequest, PortionsTaken
from squall.protocol.sandblaster.method import (
    EvaluateTrial,
    Failed,
    Iterated,
    MethodSettings,
    MethodState,
    Minimization,
    Outcome,
    Proceed,
    Request,
)
from squall.protocol.sandblaster.portions import Balance


class BatchWork(NamedTuple):
    """What is to be done: how, on which batches, balanced how, and for how long."""

    rules: MethodSettings
    examples: int  # in an epoch
    batch: int | None  # examples; None: all of them, in every iteration
    balance: Balance
    limits: Limits

    def examples_of(self, iteration: int) -> Range:
        """Iterations past an epoch's last whole batch are on the next epoch."""
        if self.batch is None:
            return Range(0, 0, self.examples)
        epoch, place = divmod(iteration, self.examples // self.batch)
        return Range(epoch, place * self.batch, (place + 1) * self.batch)


class BatchCoordinator(Coordinator):
    trained = 0

    def __init__(
        self, policy: Policy, work: BatchWork, state: MethodState | None = None, trained: int = 0, snapshots: int = 0
    ) -> None:
        super().__init__(policy, snapshots)
        self.work = work
        self.dealer = PortionDealer(work.balance, policy.shards)
        self.trained = trained
        self._method = Minimization(state or MethodState(), work.rules)
        self._request: Request | None = None  # that is being answered
        self._number = 0  # of the last calculation
        self._answers: dict[Node, tuple[float, ...]] = {}  # the shards' to that calculation
        self._awaited_values = 0  # in each
        self._evaluated_at = self.state.iteration  # the last iteration whose weights were to be measured
        self._nonfinite = ""  # the portion whose loss or gradient was no number
        self._ended: tuple[Cause, str] | None = None  # why the method has ended

    @property
    def state(self) -> MethodState:
        return self._method.state

    @property
    def wake_at(self) -> float | None:
        times = (super().wake_at, self.dealer.late_at if self.phase is Phase.RUNNING else None)
        return min((t for t in times if t is not None), default=None)

    def _on_time(self, now: float, effects: list[Effect]) -> None:
        super()._on_time(now, effects)
        self._proceed(now, effects)

    # ------------------------------------------------------------ what the base asks

    def _on_work(self, sender: Node, message: Message, now: float, effects: list[Effect]) -> None:
        match message:
            case Calculated(number, values):
                self._on_calculated(sender, number, values, now, effects)
            case PortionRequest():
                if sender in self.members.live:
                    self._on_request(sender, message, now, effects)
            case PortionsTaken(evaluation, portions):
                if self.dealer.is_open(evaluation):
                    self.dealer.taken(sender, portions)
                    if self.dealer.complete:
                        self._evaluated(now, effects)
            case Progress(_, stats) | Left(_, stats) if sender in self.members.live:
                self._note_stats(sender, stats, effects)
            case Progress() | Left():
                pass  # it was lost while this was on its way
            case _:
                raise AssertionError(f"the coordinator does not know {message!r}")

    def _proceed(self, now: float, effects: list[Effect]) -> None:
        self.dealer.late_at = None
        if self.phase is not Phase.RUNNING or not self.members.live:
            return
        if self._request is None:
            self._advance(None, now, effects)
        elif self.dealer.complete:
            self._evaluated(now, effects)
        self.dealer.deal_to_idle(now, effects)

    def _take_back(self, node: Node, applied: list[Applied], effects: list[Effect]) -> None:
        if not self.dealer.take_back(node, applied):
            self._evaluate(effects)

    def _forget(self, node: Node) -> None:
        self.dealer.forget(node)

    def _over(self) -> tuple[Cause, str] | None:
        return self._ended

    def _ledger(self) -> dict[str, object]:
        method = msgspec.to_builtins(self.state)
        if self.work.rules.sampled:
            method["loss"] = None  # of a batch that does not come again
        return {"examples": self.work.examples, "trained": self.trained, "method": method}

    # ------------------------------------------------------------ the method

    def _advance(self, answer: tuple[float, ...] | None, now: float, effects: list[Effect]) -> None:
        """Give the method its answer, and see to what it asks next."""
        while True:
            try:
                request = self._method.answered(answer)
            except StopIteration as over:
                self._method_ended(over.value, now, effects)
                return
            self._request = request
            match request:
                case Calculation():
                    self._calculate(request, effects)
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

    def _calculate(self, asked: Calculation, effects: list[Effect]) -> None:
        self._number += 1
        self._answers = {}
        self._awaited_values = len(asked.rows) * len(asked.columns) + len(asked.largest)
        message = msgspec.structs.replace(asked, number=self._number, examples=self.trained)
        effects.extend(Send(shard, message) for shard in self._shards)

    def _evaluate(self, effects: list[Effect]) -> None:
        """Have the shards open a new evaluation; portions are dealt when all have."""
        assert isinstance(self._request, EvaluateTrial)
        self.dealer.begin()
        portions = -(-size(self.work.examples_of(self._request.batch)) // self.work.balance.size)
        asked = Calculation(combine=self._request.combine, opens=self.dealer.evaluation, portions=portions)
        self._calculate(asked, effects)

    def _on_calculated(
        self, shard: Node, number: int, values: tuple[float, ...], now: float, effects: list[Effect]
    ) -> None:
        if number != self._number or self.phase is not Phase.RUNNING:
            return  # of an evaluation that was begun anew
        if self._request is None or shard in self._answers or len(values) != self._awaited_values:
            raise Refusal(f"it has calculated {len(values)} values, which nobody awaits")
        self._answers[shard] = values
        self._replacing.fruitful(shard)
        if len(self._answers) < len(self._shards):
            return
        if isinstance(self._request, EvaluateTrial):
            self.dealer.open(self.work.examples_of(self._request.batch))
            self._proceed(now, effects)
            return
        assert isinstance(self._request, Calculation)
        by_shard = zip(*(self._answers[shard] for shard in self._shards))
        dots = len(self._request.rows) * len(self._request.columns)
        answer = tuple(sum(of) if i < dots else max(of) for i, of in enumerate(by_shard))
        self._advance(answer, now, effects)

    def _may_proceed(self, effects: list[Effect]) -> float:
        """1.0 to go on, 0.0 at a limit."""
        number, limits = self.state.iteration, self.work.limits
        if self.policy.evaluate and number > self._evaluated_at:
            self._evaluated_at = number
            self._evaluations.ask(effects)
        if limits.steps is not None and number >= limits.steps:
            self._ended = Cause.STEPS, f"{number} iterations are done"
        elif limits.epochs is not None and self.trained >= limits.epochs * self.work.examples:
            self._ended = Cause.DATA, "all data is trained"
        return 0.0 if self._ended else 1.0

    # ------------------------------------------------------------ portions

    def _on_request(self, node: Node, asked: PortionRequest, now: float, effects: list[Effect]) -> None:
        if self.phase is not Phase.RUNNING:
            return  # Stop is on its way
        self.dealer.check(node, asked)
        keep, portions = False, self.dealer.portions
        if asked.done >= 0:
            self._replacing.fruitful(node)
        if asked.done >= 0 and portions is not None and asked.evaluation == self.dealer.evaluation:
            if asked.finite:
                keep = self.dealer.done(node, asked, now)
            else:  # the loss is no number at the trial weights: the line search must step shorter
                range_ = portions.ranges[asked.done]
                self._nonfinite = f"examples {range_.start} to {range_.stop} of epoch {range_.epoch}"
                self.dealer.portions = None
                self._advance((math.inf,), now, effects)
        self.dealer.deal(node, keep, now, effects)

    def _evaluated(self, now: float, effects: list[Effect]) -> None:
        """Every shard has the whole batch's gradient."""
        portions = self.dealer.portions
        assert portions is not None
        if self.phase is not Phase.RUNNING:
            return
        self.trained += portions.examples
        for node, stats in portions.work():
            self._note_stats(node, stats, effects)
        self.dealer.portions = None
        self._advance((portions.loss,), now, effects)
