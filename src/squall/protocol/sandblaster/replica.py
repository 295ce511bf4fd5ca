"""Sandblaster's replica: compute portions of a batch at the trial weights, and push their sum now and then."""

from __future__ import annotations

from collections import deque

from squall.protocol.effects import Compute, Effect, End, Keep, MeetParts, Payload, Send, UseWeights
from squall.protocol.events import Event, GradientComputed, MessageArrived, Started, TimePassed
from squall.protocol.frames import Message
from squall.protocol.machine import Refusal
from squall.protocol.messages import Exchange, Exchanged, Join, Left, Progress, Stop, Welcome
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.nursery_messages import PartsPlaced
from squall.protocol.reports import REPORT_EVERY_S, ReportSums
from squall.protocol.sandblaster.messages import Portion, PortionRequest, PortionsTaken, PushPortions

BUFFER = 0
NOWHERE = -1  # buffer of a gradient that is to stay where autograd made it


class BatchReplica:
    """It fetches (`_fetching`), computes (`_computing`), or waits for the coordinator. Pushes go on meanwhile."""

    wake_at: float | None = None

    def __init__(self, node: Node, shards: int, pid: int = 0, address: str = "", part: int = -1) -> None:
        """`address` is where its other parts call it, if they do; where they exchange by themselves it is `part` 0."""
        self.node = node
        self._part = part
        self.shards = [Node("shard", i) for i in range(shards)]
        self.pid, self._address = pid, address
        self._evaluation = 0  # that the weights are of
        self._told: deque[Portion] = deque()  # what to do next; done in turn, when the buffer is free
        self._portion: Portion | None = None  # fetched for, computed, or computed last
        self._computing = False
        self._fetching: dict[Node, None] = {}  # shards that have not sent the trial weights
        self._pushing: dict[Node, None] = {}  # shards that have not taken the buffer
        self._kept: list[int] = []  # portions in the buffer
        self._clock = 0  # fetches
        self._pushes = 0
        self._stopping = False
        self._ended = False
        self._tally = ReportSums()
        self._report_at = 0.0

    def on(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case MessageArrived(sender, message):
                self._on_message(sender, message, effects)
            case GradientComputed():
                self._on_gradient(event, now, effects)
            case Started():
                effects.append(Send(COORDINATOR, Join(self.pid, self._address)))
            case TimePassed():
                pass
            case _:
                raise AssertionError(f"{self.node} does not know {event!r}")
        return effects

    def _on_message(self, sender: Node, message: Message, effects: list[Effect]) -> None:
        match message:
            case Welcome():
                effects.append(Send(COORDINATOR, PortionRequest()))
            case Portion():
                self._told.append(message)
                self._obey(effects)
            case Exchanged() | PortionsTaken() if sender not in (
                self._fetching if isinstance(message, Exchanged) else self._pushing
            ):
                raise Refusal("it answers, and nothing was asked")
            case Exchanged():
                del self._fetching[sender]
                if not self._fetching:
                    self._tally.fetches += 1
                    self._tally.exchanges += 1
                    effects.append(UseWeights(BUFFER))
                    self._compute(effects)
            case PortionsTaken():
                del self._pushing[sender]
                if not self._pushing:
                    self._obey(effects)
            case PartsPlaced(places):
                effects.append(MeetParts(places))
            case Stop():
                self._stopping = True
            case _:
                raise AssertionError(f"{self.node} does not know {message!r}")
        self._leave_if_told(effects)

    # ------------------------------------------------------------ portions

    def _obey(self, effects: list[Effect]) -> None:
        """Keep what was computed, push what is kept, compute the next portion; once nobody reads the buffer."""
        while self._told and not self._fetching and not self._computing:
            told = self._told[0]
            if self._pushing and (told.keep or told.push):
                return
            self._told.popleft()
            self._do(told, effects)

    def _do(self, told: Portion, effects: list[Effect]) -> None:
        if told.evaluation != self._evaluation:
            self._kept.clear()  # of an evaluation that is over
        if told.keep:
            assert self._portion is not None
            effects.append(Keep(BUFFER, self._portion.weight, accumulate=bool(self._kept)))
            self._kept.append(self._portion.number)
        if told.push and self._kept:
            self._push(effects)
        if told.number < 0:
            return
        self._portion = told
        if told.evaluation == self._evaluation:
            self._compute(effects)
            return
        self._evaluation = told.evaluation
        self._clock += 1
        self._fetching = dict.fromkeys(self.shards)
        effects.extend(Send(shard, Exchange(self._clock, weights=BUFFER)) for shard in self.shards)

    def _compute(self, effects: list[Effect]) -> None:
        portion = self._portion
        assert portion is not None
        self._computing = True
        effects.append(
            Compute(portion.epoch, portion.start, portion.stop, NOWHERE, accumulate=False, local_step=False)
        )  # fmt: skip

    def _on_gradient(self, event: GradientComputed, now: float, effects: list[Effect]) -> None:
        portion = self._portion
        assert portion is not None
        self._computing = False
        self._tally.computed(event)
        done = PortionRequest(portion.evaluation, portion.number, event.loss, event.finite)
        effects.append(Send(COORDINATOR, done))
        if now >= self._report_at:
            self._report_at = now + REPORT_EVERY_S
            effects.append(Send(COORDINATOR, Progress((), self._tally.take())))
        self._leave_if_told(effects)

    # ------------------------------------------------------------ pushes

    def _push(self, effects: list[Effect]) -> None:
        self._pushes += 1
        message = PushPortions(self._evaluation, BUFFER, tuple(self._kept), self._pushes)
        self._kept.clear()
        self._pushing = dict.fromkeys(self.shards)
        for shard in self.shards:
            payload = Payload("gradient", self.node, BUFFER, self._pushes, shard.index, part=self._part)
            effects.append(Send(shard, message, payload))
        self._tally.pushes += 1
        self._tally.exchanges += 1

    def _leave_if_told(self, effects: list[Effect]) -> None:
        """Nothing of a batch that is given up counts: only what others read or write is waited for."""
        if not self._stopping or self._ended or self._pushing or self._fetching or self._computing:
            return
        self._ended = True
        effects.append(Send(COORDINATOR, Left((), self._tally.take())))
        effects.append(End("finished"))
