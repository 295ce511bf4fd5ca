"""The coordinator's machine: watches members, has the model evaluated and snapshots taken, and ends the run.

It never touches a parameter. What replicas are given to do is a subclass's: leases of data (`loop_coordinator`), or
portions of a batch (`sandblaster.coordinator`). Its parts have one subject each: who is alive (`membership`), who is
started again (`staffing`), what is measured (`evaluations`) and saved (`snapshot_rounds`), and how a run ends
(`closing`). This file ties them together.
"""

from __future__ import annotations

from abc import abstractmethod

from squall.protocol import notes
from squall.protocol.closing import Phase, after
from squall.protocol.copy_messages import CopyJoined, CopyKept
from squall.protocol.deputy_staffing import DeputyStaffing
from squall.protocol.effects import Cause, Effect, Forget, Send, WritePiece
from squall.protocol.epoch_messages import Voted
from squall.protocol.events import (
    Event,
    MessageArrived,
    Moved,
    PieceWritten,
    Started,
    StopRequested,
    TimePassed,
)
from squall.protocol.frames import Message
from squall.protocol.loss_messages import SnapshotLost
from squall.protocol.machine import Refusal
from squall.protocol.membership import Applied
from squall.protocol.messages import (
    Evaluated,
    Join,
    Left,
    Logged,
    NonFinite,
    PieceKept,
    SnapshotPiece,
    SnapshotTaken,
    Stats,
    Stop,
    ViewSeen,
    Welcome,
)
from squall.protocol.nodes import NURSERY, Node, is_address
from squall.protocol.nursery_messages import (
    Activity,
    Alive,
    Heard,
    Joined,
    Leaving,
    ProcessLost,
    ProcessStuck,
    Refused,
    StopAsked,
)


class Coordinator(DeputyStaffing):
    """What every coordinator does, beside the work."""

    # ------------------------------------------------------------ the work, which is a subclass's

    @property
    def _entry_clock(self) -> int:
        """Of a replica that joins."""
        return 0

    @property
    @abstractmethod
    def trained(self) -> int:
        """Examples so far, repeats counted once."""

    @abstractmethod
    def _on_work(self, sender: Node, message: Message, now: float, effects: list[Effect]) -> None:
        """A message about work. Raises `AssertionError` for what it does not know."""

    @abstractmethod
    def _take_back(self, node: Node, applied: list[Applied], effects: list[Effect]) -> None:
        """The work of a replica that is gone; `applied` is what each shard says that it has of it."""

    @abstractmethod
    def _forget(self, node: Node) -> None:
        """The replica is not live any more."""

    # ------------------------------------------------------------ events

    @property
    def wake_at(self) -> float | None:
        times = (
            self._deadline, self._snapshot_at, self._evaluate_at, self._ends_at, self._replacing.wake_at,
            self._heartbeats.wake_at, self._apart.wake_at, self.deputies.wake_at,
        )  # fmt: skip
        return min((t for t in times if t is not None), default=None)

    def on(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case MessageArrived(sender, message):
                self._on_message(sender, message, now, effects)
            case StopRequested():
                self._on_stop(event, now, effects)
            case PieceWritten(part, number, error):
                self._unwritten.pop(part, None)
                effects.extend(Send(node, PieceKept(number, error)) for node in self._snapshots.writer(part))
            case TimePassed():
                self._on_time(now, effects)
            case Started():
                self._on_started(now, effects)
            case Moved():
                self._on_moved(now, effects)
            case _:
                raise AssertionError(f"the coordinator does not know {event!r}")
        return effects

    def _on_message(self, sender: Node, message: Message, now: float, effects: list[Effect]) -> None:
        match message:
            case Join() if sender in self._joins or sender in self.members.live:
                raise Refusal("it joins again")
            case Join():
                self._on_join(sender, message, now, effects)
            case CopyJoined() if sender.role == "deputy":
                self._on_deputy_joined(sender, message, now, effects)
            case CopyJoined():
                self._on_copy_joined(sender, message, now, effects)
            case CopyKept():
                (self.deputies if sender.role == "deputy" else self._copies).kept(sender, effects)
            case ViewSeen():
                self._on_seen(sender, message, now, effects)
            case Left():
                self._on_work(sender, message, now, effects)
                effects.append(notes.MemberLeft(sender))
                self._depart(sender, now, effects)
                self._on_left(sender, now, effects)
            case Heard(nodes):
                self._on_heard(nodes, now)
                if sender == self.node:
                    self._on_arriving(nodes, now, effects)
            case Refused(node, why):
                self._on_refused(sender, node, why, now, effects)
            case ProcessLost() | ProcessStuck() | StopAsked() | Leaving() | Alive() | Activity() | Joined() | Voted():
                self._on_nursery(sender, message, now, effects)
            case Logged():
                self._obey(self._evaluations.logged(message, effects), now, effects)
            case NonFinite():
                self._on_non_finite(sender, message, now, effects)
            case Evaluated():
                self._on_evaluated(message, now, effects)
            case SnapshotPiece():
                if self._snapshots.wants(sender, message):
                    piece = WritePiece(sender.index, message, *self._snapshots.part(sender))
                    self._unwritten[piece.part] = piece
                    effects.append(piece)
                    self._on_arriving([sender], now, effects)
            case SnapshotTaken():
                self._on_snapshot_taken(sender, message, now, effects)
            case SnapshotLost(number):
                if self._snapshots.under_way and number == self._snapshots.newest:
                    self._snapshot_anew(now, effects)
            case _:
                self._on_work(sender, message, now, effects)

    def _on_time(self, now: float, effects: list[Effect]) -> None:
        if _due(self._deadline, now):
            if self.phase is Phase.SNAPSHOT:
                self._leave_unsaved(effects)
            else:
                self._after_stopping(now, effects)
        if _due(self._ends_at, now):
            self._stop(Cause.SECONDS, "the time given is over", now, effects)
        if _due(self._snapshot_at, now):
            self._snapshot_at = None
            self._take_snapshot(effects)
        if _due(self._evaluate_at, now):
            self._evaluate_at = after(now, self.policy.evaluate_every_s)
            self._evaluations.ask(effects)
        self._look_for_silent(now, effects)
        if _due(self.deputies.wake_at, now):
            effects += self.deputies.ask(now)
            self._part(now, effects)
        effects += self._apart.overdue(now)
        self._start_due(now, effects)

    # ------------------------------------------------------------ members

    def _is_called(self, node: Node) -> bool:
        """By other processes than the coordinator and shards: its own parts, or other replicas."""
        return bool(self._placing.apart(node))

    def _on_join(self, node: Node, message: Join, now: float, effects: list[Effect]) -> None:
        near = self._placing.on.get(node) == NURSERY.index
        if (message.address or self._is_called(node)) and not is_address(message.address, near):
            raise Refusal(f"it says that it is called at {message.address!r}, which is no number and port")
        self._replacing.joined(node, now)
        others = tuple(self._placing.apart(node).values())
        effects.append(notes.MemberJoined(node, message.pid, self._placing.on.get(node, 0), others))
        effects += self._copies.told(node)
        if node.role == "evaluator":
            self._evaluations.replaced(node, effects)
        elif self.phase is not Phase.RUNNING:
            effects.append(Send(node, Stop()))
        else:
            effects += self._apart.start(node, message.address, self._copies.moved)
            self._joins[node] = None
            self._admit(effects)

    def _on_copy_joined(self, backup: Node, message: CopyJoined, now: float, effects: list[Effect]) -> None:
        machine = self._placing.on.get(backup)
        if machine is None:
            return  # another one is in its place
        if self.policy.rooms and not is_address(message.address, machine == NURSERY.index):
            raise Refusal(f"it says that its shard is called at {message.address!r}, which is no number and port")
        self._replacing.joined(backup, now)
        if self.phase is Phase.ENDED:
            effects.append(Send(backup, Stop()))
        else:
            self._copies.joined(backup, message, effects)

    def _admit(self, effects: list[Effect]) -> None:
        for node in [node for node in self._joins if self.members.slot_free(node.index)]:
            del self._joins[node]
            self.members.join(node, self._entry_clock)
        self._show_view(effects)

    def _show_view(self, effects: list[Effect]) -> None:
        view = None if self.view_waits else self.members.next_view()
        if view is not None:
            effects.extend(Send(holder, view) for holder in self._holders)

    def _depart(self, node: Node, now: float, effects: list[Effect]) -> bool:
        self._forget(node)
        self._joins.pop(node, None)
        departs = self.members.depart(node)
        self._show_view(effects)
        return departs

    def _on_seen(self, sender: Node, message: ViewSeen, now: float, effects: list[Effect]) -> None:
        self.members.seen(sender, message)
        self._on_view_seen(now, effects)

    def _on_view_seen(self, now: float, effects: list[Effect]) -> None:
        for node, applied in self.members.take_departed():
            self._take_back(node, applied, effects)
            effects.append(Forget(node))
        for node, entry in self.members.take_joined():
            if not self._begun:
                self._begin(now, effects)
            self._welcome(node, entry, effects)
        self._admit(effects)
        self._proceed(now, effects)
        self._look_for_end(now, effects)

    def _welcome(self, node: Node, entry: int, effects: list[Effect]) -> None:
        effects.append(Send(node, Welcome(entry) if self.phase is Phase.RUNNING else Stop()))

    def _begin(self, now: float, effects: list[Effect]) -> None:
        self._begun = True
        self._ends_at = after(now, self.policy.seconds)
        self._snapshot_at = after(now, self._snapshots.pause_s())
        self._evaluate_at = after(now, self.policy.evaluate_every_s if self.policy.evaluate else None)
        effects.append(notes.TrainingBegan())

    def _note_stats(self, node: Node, stats: Stats, effects: list[Effect]) -> None:
        # What comes after the last snapshot's ledger is not in it, so that a resumed run tells it.
        if (stats.exchanges or stats.batches) and not self._last_ledger:
            effects.append(notes.WorkReported(node, stats))

    def _on_non_finite(self, sender: Node, message: NonFinite, now: float, effects: list[Effect]) -> None:
        batch = f"examples {message.start} to {message.stop} of epoch {message.epoch} (lease {message.lease})"
        text = f"replica {sender.index}: NaN or Inf in the loss or gradient of {batch}"
        if not message.final:
            effects.append(notes.Remark("nonfinite", f"{text}; not applied, tried again"))
        elif self.error or not self._quarantined(sender, message, text, effects):
            effects.append(notes.Remark("nonfinite", f"{text}, twice"))
            if not self.error:  # the first that fails is the one to look at
                self._failure = "nonfinite"
                self.error = self._hopeless(message, text)
                self._hurry(self.error, now, effects)

    def _quarantined(self, sender: Node, message: NonFinite, text: str, effects: list[Effect]) -> bool:
        """Whether training goes on without the batch."""
        return False

    def _hopeless(self, message: NonFinite, text: str) -> str:
        """Why the run ends with this batch."""
        return text + ", and again when it was tried a second time; the weights before it are kept"


def _due(at: float | None, now: float) -> bool:
    return at is not None and now >= at
