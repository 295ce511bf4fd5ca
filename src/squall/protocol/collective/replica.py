"""The replica's machine where there are no shards: it takes the group's steps, and keeps the weights that come of them.

A view tells who belongs to the group. Whoever sees a new one leaves the old group, forgets the rounds that it was
given and says how far it has come; when all have said so they form the next group (`Form`). What comes while a step or
a forming is under way, and needs to know the weights, waits until that is over: they may move at any moment.
"""

from __future__ import annotations

from collections import deque

import msgspec

from squall.protocol.collective.messages import Broken, Finished, Form, Shown, ShowWeights, Turn
from squall.protocol.collective.order import spread
from squall.protocol.effects import (
    CutGroup,
    Effect,
    End,
    Expect,
    Gather,
    JoinGroup,
    LeaveGroup,
    MeetParts,
    Payload,
    Send,
    Step,
    WriteSnapshot,
)
from squall.protocol.events import (
    BatchSkipped,
    Event,
    Gathered,
    GroupBroken,
    GroupJoined,
    MessageArrived,
    SnapshotWritten,
    Started,
    StepTaken,
    TimePassed,
    ValuesLogged,
)
from squall.protocol.frames import Message
from squall.protocol.messages import (
    Join,
    Left,
    Logged,
    NonFinite,
    PieceKept,
    Skip,
    SkipNoted,
    SnapshotTaken,
    Stats,
    Stop,
    TakeSnapshot,
    View,
    ViewSeen,
    Weights,
)
from squall.protocol.nodes import COORDINATOR, Node, replica_node
from squall.protocol.nursery_messages import PartsPlaced
from squall.protocol.shard_duties import Travelling


class CollectiveReplica:
    """Its state: `_form` while it joins a group, `_grouped` from then on, `_turn` while a step is under way.

    Where members divide the optimizer's state (`divided`), a step moves the replica's share of the weights, which is
    of its `clock` then, and it gathers the others' (`_whole`).
    """

    wake_at: float | None = None

    def __init__(
        self, node: Node, replicas: int, clock: int = 0, examples: int = 0, pid: int = 0, address: str = "",
        divided: bool = False,
    ) -> None:  # fmt: skip
        """`clock` and `examples` are those of the weights that it begins with; at `address` others call it."""
        self.node = node
        self._evaluator = Node("evaluator", replicas)  # whose buffer it is, whatever process reads it
        self.pid = pid
        self._address = address
        self._divided = divided
        self.clock = clock  # rounds that are in its weights
        self._examples = examples  # that are in them
        self._whole = True  # all its weights are of `clock`
        self._view = View(0, ())
        self._form: Form | None = None  # that is being carried out
        self._grouped = False
        self._turns: deque[Turn] = deque()
        self._turn: Turn | None = None  # whose step is under way
        self._taken: StepTaken | None = None  # what came of it, while the others' weights are gathered
        self._retried = False  # the step was not finite once
        self._failed = False  # nor when it was tried again: there are no further steps in this group
        self._waits = False  # for the answer to what it does in a group
        self._later: list[Message] = []  # that cannot be done yet
        self._snapshots: dict[int, SnapshotTaken] = {}  # being written
        self._travelling: Travelling | None = None  # the file of one
        self._ended = False

    def on(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case MessageArrived(_, message):
                self._on_message(message, effects)
            case GroupJoined(number) | StepTaken(number) | Gathered(number) | GroupBroken(number):
                if number == self._view.number:  # else of a group that it has left
                    self._waits = False
                    self._on_answer(event, effects)
            case SnapshotWritten(number, error, checksum, size):
                taken = msgspec.structs.replace(self._snapshots.pop(number), error=error, checksum=checksum)
                self._travelling = Travelling(taken, size)
                self._travelling.send_next(self.node, effects)
            case BatchSkipped():
                self._skip(effects)
            case ValuesLogged(values):
                effects.append(Send(COORDINATOR, Logged(values, Weights(self.clock, self._examples, 0.0))))
            case Started():
                effects.append(Send(COORDINATOR, Join(self.pid, self._address)))
            case TimePassed():
                pass
            case _:
                raise AssertionError(f"{self.node} does not know {event!r}")
        self._proceed(effects)
        return effects

    def _can(self, message: Message) -> bool:
        """Whether it need not wait: for the answer under way, for weights of one round, for a share that is known."""
        match message:
            case ShowWeights():
                return not self._waits and self._whole
            case TakeSnapshot():
                return not self._waits and (self._grouped or not self._divided)
            case View() | Stop():
                return not self._waits
        return True

    def _on_message(self, message: Message, effects: list[Effect]) -> None:
        if not self._can(message):
            self._later.append(message)
            if isinstance(message, View | Stop):
                effects.append(CutGroup())
            return
        match message:
            case Turn():
                if not self._failed:
                    self._turns.append(message)
                    if (lease := message.lease) is not None:
                        effects.append(Expect(lease.epoch, lease.start, lease.stop))
            case View(number):
                self._leave_group(effects)
                self._view = message
                effects.append(Send(COORDINATOR, ViewSeen(number, clock=self.clock)))
            case Form():
                self._form = message
                members = tuple(replica_node(member.slot, member.incarnation) for member in self._view.members)
                self._do(_join(message, members), effects)
            case ShowWeights(number):
                shown = Shown(number, Weights(self.clock, self._examples, 0.0))
                payload = Payload("weights", self._evaluator, 0, number, 0, self.clock)
                effects.append(Send(COORDINATOR, shown, payload))
            case TakeSnapshot(number):
                self._snapshots[number] = SnapshotTaken(number, self.clock, (), examples=self._examples)
                effects.append(WriteSnapshot(number, self.clock))
            case PieceKept(number, error):
                if self._travelling is not None and number == self._travelling.taken.number:
                    self._travelling.kept(error)
                    self._travelling.send_next(self.node, effects)
            case PartsPlaced(places):
                effects.append(MeetParts(places))
            case SkipNoted() if self._turn is not None:
                self._turn = msgspec.structs.replace(self._turn, lease=None)  # it has no batch of this round any more
                effects.append(_step(self._turn))
            case Stop():
                self._leave_group(effects)
                self._ended = True
                effects += [Send(COORDINATOR, Left((), Stats())), End("finished")]
            case _:
                raise AssertionError(f"{self.node} does not know {message!r}")

    # ------------------------------------------------------------ groups

    def _do(self, effect: JoinGroup | Step | Gather, effects: list[Effect]) -> None:
        assert not self._waits
        self._waits = True
        effects.append(effect)

    def _on_answer(self, event: GroupJoined | StepTaken | Gathered | GroupBroken, effects: list[Effect]) -> None:
        form, turn = self._form, self._turn
        match event:
            case GroupBroken(_, why, lost):
                self._leave_group(effects)
                effects.append(Send(COORDINATOR, Broken(self._view.number, why, lost)))
            case StepTaken(finite=False):
                self._on_non_finite(event, effects)
            case StepTaken():
                assert turn is not None
                self.clock, self._whole = turn.clock, not self._divided
                self._examples += turn.examples
                if self._divided:
                    self._taken = event
                    self._do(Gather(self.clock), effects)
                else:
                    self._on_step(event, effects)
            case GroupJoined() if self._divided:
                assert form is not None
                self.clock, self._whole = event.clock, False
                self._do(Gather(form.clock), effects)
            case Gathered() if self._taken is not None:
                self._whole = True
                self._on_step(self._taken, effects)
            case GroupJoined() | Gathered():
                assert form is not None
                self.clock, self._examples, self._whole = form.clock, form.examples, True
                self._form, self._grouped = None, True

    def _leave_group(self, effects: list[Effect]) -> None:
        if self._grouped or self._form is not None:
            effects.append(LeaveGroup())
        self._grouped, self._form, self._turn, self._taken = False, None, None, None
        self._retried = self._failed = False
        self._turns.clear()
        if self._divided:  # of a share that is another one's now
            self._later = [message for message in self._later if not isinstance(message, TakeSnapshot)]

    # ------------------------------------------------------------ steps

    def _proceed(self, effects: list[Effect]) -> None:
        """What has waited, and then the next turn."""
        while (message := next(filter(self._can, self._later), None)) is not None:
            self._later.remove(message)
            self._on_message(message, effects)
        if self._grouped and not self._waits and self._turns:
            self._turn = self._turns.popleft()
            self._do(_step(self._turn), effects)

    def _skip(self, effects: list[Effect]) -> None:
        """A script leaves its batch out. The step is taken when the coordinator knows: others may count it then."""
        assert self._turn is not None
        assert self._turn.lease is not None
        lease = self._turn.lease
        effects.append(Send(COORDINATOR, Skip(lease.id, lease.epoch, lease.start, lease.stop)))

    def _on_step(self, event: StepTaken, effects: list[Effect]) -> None:
        turn = self._turn
        assert turn is not None
        self._turn, self._taken, self._retried = None, None, False
        own = turn.lease.stop - turn.lease.start if turn.lease is not None else 0
        extras = {name: (value * own, own) for name, value in (event.extras or {}).items()} if own else {}
        stats = Stats(
            own, int(own > 0), event.loss * own if own else 0.0, event.compute_s, event.wait_s, 1, 1, 1, {0: 1}, extras,
            event.inside, turn.clock,
        )  # fmt: skip
        effects.append(Send(COORDINATOR, Finished(turn.clock, stats)))

    def _on_non_finite(self, event: StepTaken, effects: list[Effect]) -> None:
        """All members see the same mean, and try once more together; after that the coordinator ends the run."""
        turn, self._turn = self._turn, None
        assert turn is not None
        if event.guilty and turn.lease is not None:
            lease = turn.lease
            notice = NonFinite(lease.epoch, lease.start, lease.stop, lease.id, final=self._retried)
            effects.append(Send(COORDINATOR, notice))
        if self._retried:
            self._failed = True
            self._turns.clear()
        else:
            self._retried = True
            self._turns.appendleft(turn)


def _join(form: Form, members: tuple[Node, ...]) -> JoinGroup:
    places = form.places
    if places:
        order = spread([place.machine for place in places])
        members, places = tuple(members[at] for at in order), tuple(places[at] for at in order)
    return JoinGroup(form.number, members, form.source, bool(form.behind), form.clock, places)


def _step(turn: Turn) -> Step:
    lease = turn.lease
    epoch, start, stop = (lease.epoch, lease.start, lease.stop) if lease is not None else (0, 0, 0)
    return Step(turn.clock, epoch, start, stop, turn.examples)
