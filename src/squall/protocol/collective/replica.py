"""The replica's machine where there are no shards: it takes the group's steps, and keeps the weights that come of them.

A view tells who belongs to the group. Whoever sees a new one leaves the old group, forgets the rounds that it was
given and says how far it has come; when all have said so they form the next group (`Form`).
"""

from __future__ import annotations

from collections import deque

from squall.protocol.collective.messages import Broken, Finished, Form, Shown, ShowWeights, Turn
from squall.protocol.effects import Effect, End, JoinGroup, LeaveGroup, Payload, Send, Step, WriteSnapshot
from squall.protocol.events import (
    Event,
    GroupBroken,
    GroupJoined,
    MessageArrived,
    SnapshotWritten,
    Started,
    StepTaken,
    TimePassed,
)
from squall.protocol.frames import Message
from squall.protocol.messages import (
    Join,
    Left,
    NonFinite,
    SnapshotTaken,
    Stats,
    Stop,
    TakeSnapshot,
    View,
    ViewSeen,
    Weights,
)
from squall.protocol.nodes import COORDINATOR, Node, replica_node


class CollectiveReplica:
    """Its state: `_grouped` between `GroupJoined` and the end of a group, `_turn` while a step is under way."""

    wake_at: float | None = None

    def __init__(self, node: Node, replicas: int, clock: int = 0, examples: int = 0, pid: int = 0) -> None:
        """`clock` and `examples` are those of the weights that it begins with."""
        self.node = node
        self._evaluator = Node("evaluator", replicas)  # whose buffer it is, whatever process reads it
        self.pid = pid
        self.clock = clock  # rounds that are in its weights
        self._examples = examples  # that are in them
        self._view = View(0, ())
        self._form: Form | None = None  # that is being carried out
        self._grouped = False
        self._turns: deque[Turn] = deque()
        self._turn: Turn | None = None  # whose step is under way
        self._retried = False  # the step was not finite once
        self._ended = False

    def on(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case MessageArrived(_, message):
                self._on_message(message, effects)
            case GroupJoined(number) | GroupBroken(number) | StepTaken(number) if number != self._view.number:
                pass  # of a group that it has left meanwhile
            case StepTaken():
                self._on_step(event, effects)
            case GroupJoined():
                self._on_joined(effects)
            case GroupBroken(_, why):
                self._leave_group(effects)
                effects.append(Send(COORDINATOR, Broken(self._view.number, why)))
            case SnapshotWritten(number, error, checksum):
                taken = SnapshotTaken(number, self.clock, (), error, checksum, self._examples)
                effects.append(Send(COORDINATOR, taken))
            case Started():
                effects.append(Send(COORDINATOR, Join(self.pid)))
            case TimePassed():
                pass
            case _:
                raise AssertionError(f"{self.node} does not know {event!r}")
        return effects

    def _on_message(self, message: Message, effects: list[Effect]) -> None:
        match message:
            case Turn():
                self._turns.append(message)
                self._proceed(effects)
            case View(number):
                self._leave_group(effects)
                self._view = message
                effects.append(Send(COORDINATOR, ViewSeen(number, clock=self.clock)))
            case Form():
                self._form = message
                members = tuple(replica_node(member.slot, member.incarnation) for member in self._view.members)
                transfer = bool(message.behind)
                effects.append(JoinGroup(message.number, members, message.source, transfer, message.clock))
            case ShowWeights(number):
                shown = Shown(number, Weights(self.clock, self._examples, 0.0))
                payload = Payload("weights", self._evaluator, 0, number, 0, self.clock)
                effects.append(Send(COORDINATOR, shown, payload))
            case TakeSnapshot(number):
                effects.append(WriteSnapshot(number, self.clock))
            case Stop():
                self._leave_group(effects)
                self._ended = True
                effects += [Send(COORDINATOR, Left((), Stats())), End("finished")]
            case _:
                raise AssertionError(f"{self.node} does not know {message!r}")

    def _on_joined(self, effects: list[Effect]) -> None:
        form = self._form
        assert form is not None
        self._form, self._grouped = None, True
        self.clock, self._examples = form.clock, form.examples
        self._proceed(effects)

    def _leave_group(self, effects: list[Effect]) -> None:
        if self._grouped or self._form is not None:
            effects.append(LeaveGroup())
        self._grouped, self._form, self._turn, self._retried = False, None, None, False
        self._turns.clear()

    def _proceed(self, effects: list[Effect]) -> None:
        if self._grouped and self._turn is None and self._turns:
            self._turn = self._turns.popleft()
            effects.append(_step(self._turn))

    def _on_step(self, event: StepTaken, effects: list[Effect]) -> None:
        turn = self._turn
        assert turn is not None
        if not event.finite:
            self._on_non_finite(turn, event, effects)
            return
        self.clock = turn.clock
        self._examples += turn.examples
        self._turn, self._retried = None, False
        own = turn.lease.stop - turn.lease.start if turn.lease is not None else 0
        extras = {name: (value * own, own) for name, value in (event.extras or {}).items()} if own else {}
        stats = Stats(
            own, int(own > 0), event.loss * own if own else 0.0, event.compute_s, event.wait_s, 1, 1, 1, {0: 1}, extras
        )  # fmt: skip
        effects.append(Send(COORDINATOR, Finished(turn.clock, stats)))
        self._proceed(effects)

    def _on_non_finite(self, turn: Turn, event: StepTaken, effects: list[Effect]) -> None:
        """All members see the same mean, and try once more together; after that the coordinator ends the run."""
        if event.guilty and turn.lease is not None:
            lease = turn.lease
            notice = NonFinite(lease.epoch, lease.start, lease.stop, lease.id, final=self._retried)
            effects.append(Send(COORDINATOR, notice))
        if not self._retried:
            self._retried = True
            effects.append(_step(turn))


def _step(turn: Turn) -> Step:
    lease = turn.lease
    epoch, start, stop = (lease.epoch, lease.start, lease.stop) if lease is not None else (0, 0, 0)
    return Step(turn.clock, epoch, start, stop, turn.examples)
