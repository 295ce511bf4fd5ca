"""The evaluations that the coordinator asks for, one at a time."""

from __future__ import annotations

from collections.abc import Container

from squall.protocol.best import Best, Verdict
from squall.protocol.collective.messages import Shown, ShowWeights
from squall.protocol.effects import Effect, Payload, Send
from squall.protocol.machine import Refusal
from squall.protocol.messages import Evaluate, Evaluated, Logged, Weights
from squall.protocol.nodes import Node
from squall.protocol.notes import EvaluationAsked, Remark, WeightsMeasured


class Evaluations:
    """Asks the evaluator. What is wanted while an evaluation is under way follows it, on the weights of that moment."""

    def __init__(self, evaluator: Node, best: Best, fetches: bool = True) -> None:
        """`fetches`: there are shards that the evaluator fetches weights from; else a replica shows him its own."""
        self.evaluator = evaluator
        self.best = best
        self.under_way: int | None = None  # its number
        self.wanted = False
        self._fetches = fetches
        self._source: Node | None = None  # replica that has the weights
        self._asked: Node | None = None  # who is to show them for the evaluation under way
        self._shown: Weights | None = None  # what the evaluation under way is of, where a replica has told
        self._count = 0

    def ask(self, effects: list[Effect]) -> None:
        if self.under_way is not None:
            self.wanted = True
            return
        self.wanted = False
        self.under_way = self._count
        self._count += 1
        effects.append(EvaluationAsked(self.under_way))
        self._send(effects)

    def _send(self, effects: list[Effect]) -> None:
        assert self.under_way is not None
        question = Evaluate(self.under_way, self.best.kept, self._shown)
        if self._fetches:
            effects.append(Send(self.evaluator, question))
        elif self._shown is not None:
            assert self._asked is not None
            payload = Payload("weights", self._asked, 0, self.under_way, 0, self._shown.updates)
            effects.append(Send(self.evaluator, question, payload))
        elif self._source is not None:
            self._asked = self._source
            effects.append(Send(self._source, ShowWeights(self.under_way)))

    def ask_of(self, source: Node, live: Container[Node], effects: list[Effect]) -> None:
        """This replica has the weights from now on. One that is live still shows what it was asked for.

        Two would write into one buffer.
        """
        self._source = source
        if self.under_way is not None and self._shown is None and self._asked not in live:
            self._send(effects)

    def shown(self, sender: Node, shown: Shown, effects: list[Effect]) -> None:
        """Raises `Refusal` where it was not asked."""
        if shown.number != self.under_way or sender != self._asked or self._shown is not None:
            raise Refusal(f"it shows weights for evaluation {shown.number}, and was not asked for them")
        self._shown = shown.weights
        self._send(effects)

    def logged(self, message: Logged, effects: list[Effect]) -> Verdict:
        """Results that a user's script has measured itself."""
        effects.append(WeightsMeasured(message.values, message.weights))
        return self.best.judge(message.values)

    def replaced(self, evaluator: Node, effects: list[Effect]) -> None:
        """An evaluator joined. A new one repeats what its predecessor was lost over."""
        if evaluator == self.evaluator:
            return  # what was asked of the first before it joined has reached it: links resend
        self.evaluator = evaluator
        if self.under_way is not None and (self._fetches or self._shown is not None):
            self._send(effects)

    def moved(self, effects: list[Effect]) -> None:
        """The coordinator goes on elsewhere, and what was kept lies where it was."""
        best = self.best
        if best.goal.keep and best.kept is not None:
            text = f"the best weights so far, of {best.goal.metric} {best.kept:.4f}, are on the machine that was lost:"
            effects.append(Remark("best", f"{text} from now on the best since then are kept"))
            best.kept = None

    def answered(self, message: Evaluated, effects: list[Effect]) -> Verdict:
        self.under_way = self._shown = self._asked = None
        effects.append(WeightsMeasured(message.values, message.weights))
        if message.error:
            effects.append(Remark("error", f"the best weights could not be kept: {message.error}"))
        return self.best.judge(message.values, kept=not message.error)
