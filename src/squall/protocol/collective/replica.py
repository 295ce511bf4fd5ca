"""The replica's machine where there are no shards: it takes the group's steps, and keeps the weights that come of them.

A view tells who belongs to the group. Whoever sees a new one leaves the old group, forgets the rounds that it was
given and says how far it has come; when all have said so they form the next group (`Form`).
"""

from __future__ import annotations

from collections import deque

from squall.protocol.collective.messages import Broken, Finished, Form, Shown, ShowWeights, Turn
from squall.protocol.effects import Effect, End, Gather, JoinGroup, LeaveGroup, Payload, Send, Step, WriteSnapshot
from squall.protocol.events import (
    Event,
    Gathered,
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
    """Its state: `_form` while it joins a group, `_grouped` from then on, `_turn` while a step is under way.

    Where members divide the optimizer's state (`divided`), a step moves the replica's share of the weights, which is
    of its `clock` then, and it gathers the others' (`_whole`).
    """

    wake_at: float | None = None

    def __init__(
        self, node: Node, replicas: int, clock: int = 0, examples: int = 0, pid: int = 0, divided: bool = False
    ) -> None:  # fmt: skip
        """`clock` and `examples` are those of the weights that it begins with."""
        self.node = node
        self._evaluator = Node("evaluator", replicas)  # whose buffer it is, whatever process reads it
        self.pid = pid
        self._divided = divided
        self.clock = clock  # rounds that are in its weights
        self._examples = examples  # that are in them
        self._whole = True  # all its weights are of `clock`
        self._view = View(0, ())
        self._told = 0  # the newest view that it has told of
        self._form: Form | None = None  # that is being carried out
        self._grouped = False
        self._turns: deque[Turn] = deque()
        self._turn: Turn | None = None  # whose step is under way
        self._taken: StepTaken | None = None  # what came of it, while the others' weights are gathered
        self._retried = False  # the step was not finite once
        self._waits = False  # for the answer to what it does in a group
        self._asked: list[ShowWeights | TakeSnapshot] = []  # for when it has what is asked
        self._ended = False

    def on(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case MessageArrived(_, message):
                self._on_message(message, effects)
            case GroupJoined() | StepTaken() | Gathered() | GroupBroken():
                self._waits = False
                self._move(event)
                if self._told < self._view.number:  # it has left that group meanwhile
                    self._tell_view(effects)
                else:
                    self._go_on(event, effects)
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
            case View():
                self._leave_group(effects)
                self._view = message
                if not self._waits:  # else its weights may be about to move
                    self._tell_view(effects)
            case Form():
                self._form = message
                members = tuple(replica_node(member.slot, member.incarnation) for member in self._view.members)
                transfer = bool(message.behind)
                self._do(JoinGroup(message.number, members, message.source, transfer, message.clock), effects)
            case ShowWeights() | TakeSnapshot():
                self._asked.append(message)
                self._answer(effects)
            case Stop():
                self._leave_group(effects)
                self._ended = True
                effects += [Send(COORDINATOR, Left((), Stats())), End("finished")]
            case _:
                raise AssertionError(f"{self.node} does not know {message!r}")

    def _answer(self, effects: list[Effect]) -> None:
        """Show weights that are of one round; write the own share when it is known which that is."""
        for message in list(self._asked):
            match message:
                case ShowWeights(number) if self._whole:
                    shown = Shown(number, Weights(self.clock, self._examples, 0.0))
                    payload = Payload("weights", self._evaluator, 0, number, 0, self.clock)
                    effects.append(Send(COORDINATOR, shown, payload))
                    self._asked.remove(message)
                case TakeSnapshot(number) if self._grouped or not self._divided:
                    effects.append(WriteSnapshot(number, self.clock))
                    self._asked.remove(message)

    # ------------------------------------------------------------ groups

    def _do(self, effect: JoinGroup | Step | Gather, effects: list[Effect]) -> None:
        assert not self._waits
        self._waits = True
        effects.append(effect)

    def _move(self, event: GroupJoined | StepTaken | Gathered | GroupBroken) -> None:
        """What the replica has now, whether or not it is still in that group."""
        form, turn = self._form, self._turn
        match event:
            case GroupJoined() if self._divided:
                self.clock, self._whole = event.clock, False
            case GroupJoined() | Gathered() if form is not None:
                self.clock, self._examples, self._whole = form.clock, form.examples, True
            case StepTaken(finite=True):
                assert turn is not None
                self.clock, self._whole = turn.clock, not self._divided
                self._examples += turn.examples
            case Gathered():
                self._whole = True

    def _go_on(self, event: GroupJoined | StepTaken | Gathered | GroupBroken, effects: list[Effect]) -> None:
        match event:
            case GroupBroken(_, why, lost):
                self._leave_group(effects)
                effects.append(Send(COORDINATOR, Broken(self._view.number, why, lost)))
            case StepTaken(finite=False):
                self._on_non_finite(event, effects)
            case GroupJoined() if self._divided:
                assert self._form is not None
                self._do(Gather(self._form.clock), effects)
            case StepTaken() if self._divided:
                self._taken = event
                self._do(Gather(self.clock), effects)
            case StepTaken():
                self._on_step(event, effects)
            case Gathered() if self._taken is not None:
                self._on_step(self._taken, effects)
            case GroupJoined() | Gathered():
                self._form, self._grouped = None, True
                self._answer(effects)
                self._proceed(effects)

    def _leave_group(self, effects: list[Effect]) -> None:
        if self._grouped or self._form is not None:
            effects.append(LeaveGroup())
        self._grouped = False
        self._turns.clear()
        self._asked = [message for message in self._asked if isinstance(message, ShowWeights)]
        if not self._waits:
            self._forget()

    def _forget(self) -> None:
        self._form = self._turn = self._taken = None
        self._retried = False

    def _tell_view(self, effects: list[Effect]) -> None:
        self._forget()
        self._told = self._view.number
        self._answer(effects)
        effects.append(Send(COORDINATOR, ViewSeen(self._told, clock=self.clock)))

    # ------------------------------------------------------------ steps

    def _proceed(self, effects: list[Effect]) -> None:
        if self._grouped and self._turn is None and self._turns:
            self._turn = self._turns.popleft()
            self._do(_step(self._turn), effects)

    def _on_step(self, event: StepTaken, effects: list[Effect]) -> None:
        turn = self._turn
        assert turn is not None
        self._forget()
        own = turn.lease.stop - turn.lease.start if turn.lease is not None else 0
        extras = {name: (value * own, own) for name, value in (event.extras or {}).items()} if own else {}
        stats = Stats(
            own, int(own > 0), event.loss * own if own else 0.0, event.compute_s, event.wait_s, 1, 1, 1, {0: 1}, extras
        )  # fmt: skip
        effects.append(Send(COORDINATOR, Finished(turn.clock, stats)))
        self._answer(effects)
        self._proceed(effects)

    def _on_non_finite(self, event: StepTaken, effects: list[Effect]) -> None:
        """All members see the same mean, and try once more together; after that the coordinator ends the run."""
        turn = self._turn
        assert turn is not None
        if event.guilty and turn.lease is not None:
            lease = turn.lease
            notice = NonFinite(lease.epoch, lease.start, lease.stop, lease.id, final=self._retried)
            effects.append(Send(COORDINATOR, notice))
        if not self._retried:
            self._retried = True
            self._do(_step(turn), effects)


def _step(turn: Turn) -> Step:
    lease = turn.lease
    epoch, start, stop = (lease.epoch, lease.start, lease.stop) if lease is not None else (0, 0, 0)
    return Step(turn.clock, epoch, start, stop, turn.examples)
