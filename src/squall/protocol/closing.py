"""How a run ends, whatever ended it: the closing sequence of every coordinator.

    running -> stopping (replicas finish their exchange and leave) -> evaluating (the final weights)
            -> snapshot -> ended

A user's stop skips the evaluation, and gives each phase its time: whoever does not answer is not waited for beyond it,
but for files of the snapshot that come from other machines, while something of each goes on arriving.
So does a machine that leaves with a shard: the run has moved when it has ended so, and begins again without the
machine. One that is lost with a shard leaves no time for that: the run begins again from the newest snapshot. A shard
that nobody can succeed, or a batch that stays NaN, ends the run with an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import StrEnum

from squall.protocol import notes
from squall.protocol.apart import Apart
from squall.protocol.best import Best, Verdict
from squall.protocol.copies import Copies
from squall.protocol.deputies import Deputies
from squall.protocol.effects import Cause, Effect, End, Forget, Send
from squall.protocol.evaluations import Evaluations
from squall.protocol.heartbeats import Heartbeats
from squall.protocol.membership import Applied, Membership, common
from squall.protocol.messages import Evaluated, SnapshotTaken, Stop
from squall.protocol.nodes import COORDINATOR, Node, shard_nodes
from squall.protocol.nursery import LEAVE_WITHIN_S
from squall.protocol.placing import Placing
from squall.protocol.policy import Policy
from squall.protocol.replacing import Replacing
from squall.protocol.snapshot_rounds import SnapshotRounds

STOP_WITHIN_S = 0.8  # after a user's stop, replicas that are still computing are not waited for
NOBODY_LEFT = "nobody is left who has the weights"


class Phase(StrEnum):
    RUNNING = "running"
    STOPPING = "stopping"
    EVALUATING = "evaluating"
    SNAPSHOT = "snapshot"
    ENDED = "ended"


class Closing(ABC):
    """What a coordinator knows of its run's end. `snapshots` is the number of the newest one there is."""

    node = COORDINATOR

    def __init__(self, policy: Policy, snapshots: int = 0) -> None:
        self.policy = policy
        self.members = Membership(policy.shards)
        self.phase = Phase.RUNNING
        self.cause, self.reason = Cause.FAILED, ""  # why it stopped
        self.error = ""
        self._failure = "failed"  # the status of a run that ends with an error
        self._shards = shard_nodes(policy.shards)
        best = Best(policy.goal, policy.until)
        self._evaluations = Evaluations(Node("evaluator", policy.replicas), best, fetches=policy.shards > 0)
        self._snapshots = SnapshotRounds(snapshots, policy.snapshot_every_s, policy.snapshot_first_s)
        self._unwritten: dict[int | Node, Effect] = {}  # the host is to write it, and has not answered; by whose it is
        self._joins: dict[Node, None] = {}  # joins that wait for the slot to be free
        self._replacing = Replacing()
        self._placing = Placing(policy)
        self._apart = Apart(self._placing)
        self._copies = Copies(policy, self._placing)
        self.deputies = Deputies(policy, self._placing)
        self._heartbeats = Heartbeats(policy.pulse.every_s, policy.pulse.lost_after_s)  # of other machines' nurseries
        self._begun = False  # a replica was welcomed
        self._wanted = False  # a script asked for the end: the run has finished well
        self._hurried = False  # a user's stop, or an error: no final evaluation
        self._moves = False  # it shall go on from its last snapshot, without a machine that leaves
        self._save_by: float | None = None  # when a run in a hurry stops waiting for its last snapshot
        self._last_snapshot = False  # the snapshot under way closes the run
        self._ends_at: float | None = None  # when the training time that the user has given is over
        self._evaluate_at: float | None = None
        self._snapshot_at: float | None = None
        self._deadline: float | None = None  # when this phase of the end is waited for no longer

    @property
    def home(self) -> int:
        """The machine of this coordinator."""
        return self._placing.home

    @abstractmethod
    def _over(self) -> tuple[Cause, str] | None:
        """Why there is nothing left to do; None while there is something."""

    @abstractmethod
    def _ledger(self) -> dict[str, object]:
        """The position of the work as plain values, for a snapshot."""

    @property
    def _holders(self) -> Sequence[Node]:
        """Who has the weights: views are shown to them, they write snapshots, and end with the run."""
        return self._shards

    @property
    def _last_ledger(self) -> bool:
        """That of the last snapshot is taken."""
        return self._last_snapshot and (self._snapshots.under_way or self.phase is Phase.ENDED)

    @property
    def view_waits(self) -> bool:
        """Not the moment to show a view, though somebody has come or gone."""
        return False

    def _dismiss(self, effects: list[Effect]) -> None:
        """The training is over: replicas are wanted no more."""
        effects.extend(Send(node, Stop()) for node in [*self.members.live, *self._joins])

    @property
    def _dismissed(self) -> bool:
        """Nothing of the training is under way any more."""
        return not self.members.live and self.members.settled

    def _take_snapshot(self, effects: list[Effect]) -> None:
        """As soon as all that it would have to hold is there."""
        if not self._snapshots.under_way:
            self._snapshots.take(self._holders, self._ledger(), effects)

    def _extended(self, ledger: dict[str, object], covers: Sequence[Applied]) -> tuple[dict[str, object], Applied]:
        """An earlier ledger, with what the shards have of work that was given since; and what all of them have."""
        return ledger, common(covers, len(covers))

    # ------------------------------------------------------------ answers of evaluator and shards

    def _on_evaluated(self, message: Evaluated, now: float, effects: list[Effect]) -> None:
        if message.number != self._evaluations.under_way:
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
            self._set_deadline(now)
            return
        if self._last_snapshot:
            if self._snapshots.failure and not self.error:
                self.error = f"the last snapshot could not be written: {self._snapshots.failure}"
            self._end(effects)
        elif self.phase is Phase.SNAPSHOT:
            self._close_with_snapshot(now, effects)  # this one was begun before the training was over
        elif self.phase is Phase.RUNNING:
            self._snapshot_at = after(now, self._snapshots.pause_s())

    # ------------------------------------------------------------ the end

    def _look_for_end(self, now: float, effects: list[Effect]) -> None:
        if self.phase is Phase.RUNNING and (over := self._over()) is not None:
            self._stop(*over, now, effects)
        elif self.phase is Phase.STOPPING and self._dismissed:
            self._after_stopping(now, effects)

    def _stop(self, cause: Cause, reason: str, now: float, effects: list[Effect]) -> None:
        if self.phase is not Phase.RUNNING:
            return
        self.phase = Phase.STOPPING
        self.cause, self.reason = cause, reason
        self._ends_at = self._snapshot_at = self._evaluate_at = None
        self._dismiss(effects)
        self._look_for_end(now, effects)

    def _hurry(self, reason: str, now: float, effects: list[Effect], wanted: bool = False) -> None:
        """Stop without a final evaluation, and without waiting long for whoever does not answer."""
        if self.phase is Phase.ENDED:
            return
        if not wanted and self._save_by is None:
            self._save_by = now + self._stop_within_s + self.policy.save_within_s
        if self.phase in (Phase.STOPPING, Phase.EVALUATING) and not (wanted or self._hurried):
            where = "before the final weights were evaluated" if self.policy.evaluate else "as training ended"
            self.reason = f"{reason} {where} ({self.reason})"
        if self.phase is not Phase.SNAPSHOT:  # there nothing is left to skip
            self._hurried = True
            self._stop(Cause.SCRIPT if self._wanted else Cause.STOPPED, reason, now, effects)
        self._set_deadline(now)

    def _move(self, reason: str, now: float, effects: list[Effect]) -> None:
        """End as a user's stop does, but for more time for exchanges, and the run goes on from the snapshot."""
        self._moves |= self.phase is not Phase.SNAPSHOT and not self._hurried
        self._hurry(reason, now, effects)

    def _stay(self, wanted: bool) -> None:
        """Who stops a run that moves wants its end: soon, or because it has come to what was wanted of it."""
        if self._moves:
            self._moves, self._save_by, self._deadline = False, None, None
            if wanted:
                self._wanted, self.cause = True, Cause.SCRIPT

    def _set_deadline(self, now: float) -> None:
        """Give the phase under way its time, if the run ends in a hurry."""
        if self.phase is Phase.SNAPSHOT:
            self._deadline = None if self._save_by is None else self._snapshots.waited_for(self._save_by)
        elif self._deadline is None and self.phase in (Phase.STOPPING, Phase.EVALUATING) and self._hurried:
            self._deadline = now + self._stop_within_s

    def _on_arriving(self, nodes: Iterable[Node], now: float, effects: list[Effect]) -> None:
        """Something has come of these to the coordinator itself, and of their files if it waits for some."""
        self._snapshots.came(nodes, now)
        if self.phase is Phase.SNAPSHOT and self._save_by is not None:
            self._set_deadline(now)
            if not self._moves and any(shard in nodes for shard in self._snapshots.awaited):
                effects.append(notes.Saving(*self._snapshots.travelled))

    @property
    def _stop_within_s(self) -> float:
        return LEAVE_WITHIN_S if self._moves else STOP_WITHIN_S

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
        self.phase = Phase.SNAPSHOT
        if self._snapshots.under_way:
            self._set_deadline(now)
        else:
            self._last_snapshot = True
            self._take_snapshot(effects)
            self._give_time(now)

    def _snapshot_anew(self, now: float, effects: list[Effect]) -> None:
        """What there is of the one under way is lost."""
        self._snapshots.begin_anew(self._ledger(), effects)
        self._give_time(now)

    def _give_time(self, now: float) -> None:
        """To a snapshot that begins: the one before may have taken it."""
        if self._save_by is not None:
            self._save_by = max(self._save_by, now + self.policy.save_within_s)
        self._set_deadline(now)

    def _leave_unsaved(self, effects: list[Effect]) -> None:
        """The last snapshot was not written in time: a resume goes on from the one before."""
        silent = ", ".join(f"{node.role} {node.index}" for node in self._snapshots.awaited or self._holders)
        why = f"{silent} did not answer in time" if silent else NOBODY_LEFT
        self._wanted = self._moves = False  # without its weights it has not finished
        self._hurried, self.cause = True, Cause.STOPPED
        self._end(effects, f"; {why}, so that nothing was saved")

    def _fail(self, error: str, effects: list[Effect], gone: Iterable[Node] = ()) -> None:
        """The run cannot go on. Nobody waits until those that are gone have heard of it."""
        if self.phase is Phase.ENDED:
            return
        effects.extend(map(Forget, gone))
        self.error = self.reason = error
        self._end(effects)

    def _go_back(self, error: str, effects: list[Effect], gone: Iterable[Node] = ()) -> None:
        """Weights are lost with a machine: the run ends, and goes on from its newest snapshot on those that stay."""
        if self.policy.goes_back and (self._moves or not self._hurried):
            self._failure = "moved"
        self._fail(error, effects, gone)

    def _end(self, effects: list[Effect], remark: str = "") -> None:
        self.phase = Phase.ENDED
        self._deadline = self._ends_at = self._snapshot_at = self._evaluate_at = None
        self._replacing.cease()
        self._heartbeats.cease()
        self._apart.cease()
        self.deputies.wake_at = None
        effects.extend(Forget(node) for node in self.members.live if node not in self._holders)  # waited for no more
        deputies = [] if self.deputies.node is None or self.deputies.whole else [self.deputies.node]
        effects.extend(Send(each, Stop()) for each in (*self._holders, *self._copies.unready, *deputies))
        if self.policy.evaluate:
            effects.append(Send(self._evaluations.evaluator, Stop()))
        others = (machine for machine in self._placing.rooms if machine != self.home)  # that sees this process end
        effects.extend(Send(Node("nursery", machine), Stop()) for machine in others)
        status = self._failure if self.error else "finished"
        if self._hurried and not self._wanted and not self.error:
            status = "moved" if self._moves else "interrupted"
        effects.append(End(status, (self.error or self.reason) + remark, Cause.FAILED if self.error else self.cause))


def after(now: float, seconds: float | None) -> float | None:
    return None if seconds is None else now + seconds
