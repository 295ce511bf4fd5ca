"""The coordinator's machine: watches members, has the model evaluated and snapshots taken, and ends the run.

It never touches a parameter. What replicas are given to do is a subclass's: leases of data (`leasing`), or portions of
a batch (`sandblaster`). Its parts have one subject each: who is alive (`membership`), who is started again
(`replacing`), evaluations and snapshots (`side_work`). This file ties them together, and has the closing sequence,
which is the same whatever ended a run:

    running -> stopping (replicas finish their exchange and leave) -> evaluating (the final weights)
            -> snapshot -> ended

A user's stop skips the evaluation, and gives each phase its time: whoever does not answer is not waited for beyond it.
A lost shard, or a batch that stays NaN, ends the run with an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum

import msgspec

from squall.protocol import notes
from squall.protocol.best import Best, Goal, Verdict
from squall.protocol.core import (
    Cause,
    Effect,
    End,
    Event,
    Forget,
    MemberLost,
    MessageArrived,
    Node,
    Send,
    Started,
    StartMember,
    StopRequested,
    TimePassed,
)
from squall.protocol.membership import Covers, Membership
from squall.protocol.messages import (
    Evaluated,
    Join,
    Left,
    Logged,
    Message,
    NonFinite,
    SnapshotTaken,
    Stats,
    Stop,
    ViewSeen,
    Welcome,
)
from squall.protocol.replacing import LOST_IN_A_ROW, Replacing
from squall.protocol.side_work import Evaluations, Snapshots

STOP_WITHIN_S = 1.0  # after a user's stop, replicas that are still computing are not waited for
SAVE_WITHIN_S = 1.2  # beyond that, shards that have not written a small snapshot


class Policy(msgspec.Struct, frozen=True):
    """What of a plan the coordinator must know."""

    replicas: int
    shards: int
    evaluate: bool = True  # there is a validation set
    evaluate_every_s: float | None = None  # beside the one after each epoch
    until: tuple[str, float] | None = None  # end when this metric is reached (loss: falls to)
    seconds: float | None = None  # of training
    snapshot_every_s: float | None = 60.0
    save_within_s: float = SAVE_WITHIN_S  # the last snapshot of a run that a user stops
    goal: Goal = Goal()


class Phase(StrEnum):
    RUNNING = "running"
    STOPPING = "stopping"
    EVALUATING = "evaluating"
    SNAPSHOT = "snapshot"
    ENDED = "ended"


class Coordinator(ABC):
    """What every coordinator does. `snapshots` is the number of the newest one there is."""

    def __init__(self, policy: Policy, snapshots: int = 0) -> None:
        self.policy = policy
        self.members = Membership(policy.shards)
        self.phase = Phase.RUNNING
        self.cause, self.reason = Cause.FAILED, ""  # why it stopped
        self.error = ""
        self._failure = "failed"  # the status of a run that ends with an error
        self._shards = [Node("shard", i) for i in range(policy.shards)]
        self._evaluations = Evaluations(Node("evaluator", policy.replicas), Best(policy.goal, policy.until))
        self._snapshots = Snapshots(self._shards, snapshots)
        self._joins: dict[Node, None] = {}  # joins that wait for the slot to be free
        self._replacing = Replacing()
        self._begun = False  # a replica was welcomed
        self._wanted = False  # a script asked for the end
        self._hurried = False  # a user's stop, or an error: no final evaluation
        self._save_by: float | None = None  # whatever it is that a user's stop, or an error, has not saved by then
        self._last_snapshot = False  # the snapshot under way closes the run
        self._ends_at: float | None = None  # when the training time given is over
        self._evaluate_at: float | None = None
        self._snapshot_at: float | None = None
        self._deadline: float | None = None  # of a phase of the end

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
    def _proceed(self, now: float, effects: list[Effect]) -> None:
        """Members have come or gone: give work to whom it is due."""

    @abstractmethod
    def _take_back(self, node: Node, applied: list[Covers], effects: list[Effect]) -> None:
        """The work of a replica that is gone; `applied` is what each shard says that it has of it."""

    @abstractmethod
    def _forget(self, node: Node) -> None:
        """The replica is not live any more."""

    @abstractmethod
    def _over(self) -> tuple[Cause, str] | None:
        """Why there is nothing left to do; None while there is."""

    @abstractmethod
    def _ledger(self) -> dict[str, object]:
        """The position of the work as plain values, for a snapshot."""

    def _extended(self, ledger: dict[str, object], progress: dict[str, int]) -> dict[str, object]:
        """An earlier ledger, with what the shards have of work that was given since."""
        return ledger

    # ------------------------------------------------------------ events

    @property
    def wake_at(self) -> float | None:
        times = (self._deadline, self._snapshot_at, self._evaluate_at, self._ends_at, self._replacing.wake_at)
        return min((t for t in times if t is not None), default=None)

    def on(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case MessageArrived(sender, message):
                self._on_message(sender, message, now, effects)
            case MemberLost(node, why):
                self._on_lost(node, why, now, effects)
            case StopRequested(why, failed, wanted):
                if failed:
                    self.error = why
                self._wanted |= wanted and self.phase is Phase.RUNNING
                self._hurry(why, now, effects, wanted)
            case TimePassed():
                self._on_time(now, effects)
            case Started():
                pass
            case _:
                raise AssertionError(f"the coordinator does not know {event!r}")
        return effects

    def _on_message(self, sender: Node, message: Message, now: float, effects: list[Effect]) -> None:
        match message:
            case Join(pid):
                self._on_join(sender, pid, now, effects)
            case ViewSeen():
                self.members.seen(sender.index, message)
                self._on_view_seen(now, effects)
            case Left():
                self._on_work(sender, message, now, effects)
                effects.append(notes.MemberLeft(sender))
                self._depart(sender, effects)
            case Logged():
                self._obey(self._evaluations.logged(message, effects), now, effects)
            case NonFinite():
                self._on_non_finite(sender, message, now, effects)
            case Evaluated():
                self._on_evaluated(message, now, effects)
            case SnapshotTaken():
                self._on_snapshot_taken(sender, message, now, effects)
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
            if not self._snapshots.under_way:
                self._snapshots.take(self._ledger(), effects)
        if _due(self._evaluate_at, now):
            self._evaluate_at = _after(now, self.policy.evaluate_every_s)
            self._evaluations.ask(effects)
        self._start_due(now, effects)

    # ------------------------------------------------------------ members

    def _on_join(self, node: Node, pid: int, now: float, effects: list[Effect]) -> None:
        self._replacing.joined(node, now)
        effects.append(notes.MemberJoined(node, pid))
        if node.role == "evaluator":
            self._evaluations.replaced(node, effects)
        elif self.phase is not Phase.RUNNING:
            effects.append(Send(node, Stop()))
        else:
            self._joins[node] = None
            self._admit(effects)

    def _admit(self, effects: list[Effect]) -> None:
        for node in [node for node in self._joins if self.members.slot_free(node.index)]:
            del self._joins[node]
            self.members.join(node, self._entry_clock)
        self._show_view(effects)

    def _show_view(self, effects: list[Effect]) -> None:
        view = self.members.next_view()
        if view is not None:
            effects.extend(Send(shard, view) for shard in self._shards)

    def _depart(self, node: Node, effects: list[Effect]) -> bool:
        """False if the node was not a member, so that no view has to be seen without it."""
        self._forget(node)
        self._joins.pop(node, None)
        departs = self.members.depart(node)
        self._show_view(effects)
        return departs

    def _on_view_seen(self, now: float, effects: list[Effect]) -> None:
        for node, applied in self.members.take_departed():
            self._take_back(node, applied, effects)
            effects.append(Forget(node))
        for node, entry in self.members.take_joined():
            if not self._begun:
                self._begin(now, effects)
            if self.phase is Phase.RUNNING:
                effects.append(Send(node, Welcome(entry)))
            else:
                effects.append(Send(node, Stop()))
        self._admit(effects)
        self._proceed(now, effects)
        self._look_for_end(now, effects)

    def _begin(self, now: float, effects: list[Effect]) -> None:
        self._begun = True
        self._ends_at = _after(now, self.policy.seconds)
        self._snapshot_at = _after(now, self.policy.snapshot_every_s)
        self._evaluate_at = _after(now, self.policy.evaluate_every_s if self.policy.evaluate else None)
        effects.append(notes.TrainingBegan())

    def _on_lost(self, node: Node, why: str, now: float, effects: list[Effect]) -> None:
        if self.phase is Phase.ENDED:
            return
        effects.append(notes.MemberDied(node, why))
        if node.role == "shard":
            self._fail(f"shard {node.index} was lost ({why})", effects)
            return
        if node.role == "evaluator" or not self._depart(node, effects):
            effects.append(Forget(node))  # at once: its Join may still be on its way, and nobody is behind it
        self._replace(node, why, now, effects)
        self._look_for_end(now, effects)

    def _replace(self, node: Node, why: str, now: float, effects: list[Effect]) -> None:
        ends = self.phase is Phase.EVALUATING  # and would not, if each evaluator died late
        hopeless = self._replacing.lost(node, now, however_late=ends) >= LOST_IN_A_ROW
        if node.role == "replica" and self.phase is not Phase.RUNNING:
            return
        text = f"{node.role} {node.index} was lost {LOST_IN_A_ROW} times in a row, last: {why}"
        if node.role == "replica" and hopeless:
            self._give_slot_up(node, text, now, effects)
        elif hopeless and ends:
            effects.append(notes.Remark("warning", f"{text}; the final weights are not evaluated"))
            self._close_with_snapshot(now, effects)
        else:
            self._replacing.replace(node, now)
            if ends:
                self._replacing.hasten(now)
            self._start_due(now, effects)

    def _give_slot_up(self, node: Node, text: str, now: float, effects: list[Effect]) -> None:
        """Nobody takes this replica's place any more; without any replica the run ends."""
        self._replacing.given_up[node.index] = None
        if len(self._replacing.given_up) < self.policy.replicas:
            effects.append(notes.Remark("warning", f"{text}; the others go on without it"))
            self._proceed(now, effects)
        else:
            self.error = text
            self._hurry(text, now, effects)

    def _start_due(self, now: float, effects: list[Effect]) -> None:
        for node in self._replacing.take_due(now):
            if node.role == "evaluator" or self.phase is Phase.RUNNING:
                effects += [StartMember(node), notes.MemberReplaced(node)]

    def _note_stats(self, node: Node, stats: Stats, effects: list[Effect]) -> None:
        # What comes after the last snapshot's ledger is not in it, so that a resumed run tells it.
        if (stats.exchanges or stats.batches) and not self._last_snapshot:
            effects.append(notes.WorkReported(node, stats))

    def _on_non_finite(self, sender: Node, message: NonFinite, now: float, effects: list[Effect]) -> None:
        batch = f"examples {message.start} to {message.stop} of epoch {message.epoch} (lease {message.lease})"
        text = f"replica {sender.index}: NaN or Inf in the loss or gradient of {batch}"
        effects.append(notes.Remark("nonfinite", text + (", twice" if message.final else "; not applied, tried again")))
        if message.final and not self.error:  # the first that fails is the one to look at
            self._failure = "nonfinite"
            self.error = text + ", and again when it was tried a second time; the weights before it are kept"
            self._hurry(self.error, now, effects)

    # ------------------------------------------------------------ answers of evaluator and shards

    def _on_evaluated(self, message: Evaluated, now: float, effects: list[Effect]) -> None:
        if not self._evaluations.awaits(message):
            return
        self._replacing.fruitful(self._evaluations.evaluator)
        if self._obey(self._evaluations.answered(message, effects), now, effects):
            return
        if self._evaluations.wanted and self.phase in (Phase.RUNNING, Phase.EVALUATING):
            self._evaluations.ask(effects)
        elif self.phase is Phase.EVALUATING:
            self._close_with_snapshot(now, effects)

    def _obey(self, verdict: Verdict, now: float, effects: list[Effect]) -> bool:
        """Stop, if that is the verdict on an evaluation."""
        if verdict is None or self.phase is not Phase.RUNNING:
            return False
        if verdict[0] is Cause.REACHED:
            effects.append(notes.TargetReached(verdict[1]))
        self._stop(*verdict, now, effects)
        return True

    def _on_snapshot_taken(self, shard: Node, message: SnapshotTaken, now: float, effects: list[Effect]) -> None:
        if not self._snapshots.answered(shard, message, self._last_snapshot, self._extended, effects):
            return
        if self._last_snapshot:
            if self._snapshots.failure and not self.error:
                self.error = f"the last snapshot could not be written: {self._snapshots.failure}"
            self._end(effects)
        elif self.phase is Phase.SNAPSHOT:
            self._close_with_snapshot(now, effects)  # the one under way had begun too early
        elif self.phase is Phase.RUNNING:
            self._snapshot_at = _after(now, self.policy.snapshot_every_s)

    # ------------------------------------------------------------ the end

    def _look_for_end(self, now: float, effects: list[Effect]) -> None:
        if self.phase is Phase.RUNNING and (over := self._over()) is not None:
            self._stop(*over, now, effects)
        elif self.phase is Phase.STOPPING and not self.members.live and self.members.settled:
            self._after_stopping(now, effects)

    def _stop(self, cause: Cause, reason: str, now: float, effects: list[Effect]) -> None:
        if self.phase is not Phase.RUNNING:
            return
        self.phase = Phase.STOPPING
        self.cause, self.reason = cause, reason
        self._ends_at = self._snapshot_at = self._evaluate_at = None
        for node in [*self.members.live, *self._joins]:
            effects.append(Send(node, Stop()))
        self._look_for_end(now, effects)

    def _hurry(self, reason: str, now: float, effects: list[Effect], wanted: bool = False) -> None:
        """Stop without a final evaluation, and without waiting long for whoever does not answer."""
        if self.phase is Phase.ENDED:
            return
        if not wanted and self._save_by is None:
            self._save_by = now + STOP_WITHIN_S + self.policy.save_within_s
        if self.phase is not Phase.SNAPSHOT:  # there nothing is left to skip
            self._hurried = True
            self._stop(Cause.SCRIPT if self._wanted else Cause.STOPPED, reason, now, effects)
        self._set_deadline(now)

    def _set_deadline(self, now: float) -> None:
        """Of the phase under way, if somebody is in a hurry."""
        if self._deadline is not None:
            return
        if self.phase in (Phase.STOPPING, Phase.EVALUATING) and self._hurried:
            self._deadline = now + STOP_WITHIN_S
        elif self.phase is Phase.SNAPSHOT:
            self._deadline = self._save_by

    def _after_stopping(self, now: float, effects: list[Effect]) -> None:
        self._deadline = None
        if self.phase is Phase.STOPPING:
            effects.append(notes.TrainingOver())
        if self.policy.evaluate and not self._hurried:
            self.phase = Phase.EVALUATING
            self._evaluations.ask(effects)
            self._replacing.hasten(now)
        else:
            self._close_with_snapshot(now, effects)

    def _close_with_snapshot(self, now: float, effects: list[Effect]) -> None:
        if self.phase is not Phase.SNAPSHOT:
            self.phase, self._deadline = Phase.SNAPSHOT, None
            self._set_deadline(now)
        if not self._snapshots.under_way:
            self._last_snapshot = True
            self._snapshots.take(self._ledger(), effects)

    def _leave_unsaved(self, effects: list[Effect]) -> None:
        """The last snapshot was not written in time: a resume goes on from the one before."""
        silent = ", ".join(f"shard {shard.index}" for shard in self._snapshots.awaited)
        self._hurried, self._wanted, self.cause = True, False, Cause.STOPPED  # without its weights it has not finished
        self._end(effects, f"; {silent} did not answer in time, so that nothing was saved")

    def _fail(self, error: str, effects: list[Effect]) -> None:
        self.error = self.reason = error
        self._end(effects)

    def _end(self, effects: list[Effect], remark: str = "") -> None:
        self.phase = Phase.ENDED
        self._deadline = self._ends_at = self._snapshot_at = self._evaluate_at = None
        self._replacing.cease()
        effects.extend(Send(shard, Stop()) for shard in self._shards)
        if self.policy.evaluate:
            effects.append(Send(self._evaluations.evaluator, Stop()))
        status = self._failure if self.error else "interrupted" if self._hurried and not self._wanted else "finished"
        effects.append(End(status, (self.error or self.reason) + remark, Cause.FAILED if self.error else self.cause))


def _after(now: float, seconds: float | None) -> float | None:
    return None if seconds is None else now + seconds


def _due(at: float | None, now: float) -> bool:
    return at is not None and now >= at
