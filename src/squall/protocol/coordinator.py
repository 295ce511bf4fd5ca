"""The coordinator's machine: hands out data, watches members, and never touches a parameter.

It is made of three small parts, each with one subject: the ledger of leases (`leases`), the membership with its
views (`membership`), and the closing sequence below. A run ends in the same steps whatever ended it:

    running -> stopping (replicas finish their exchange and leave) -> evaluating (the final weights)
            -> snapshot -> ended

A user's stop skips the evaluation; a lost shard, or a batch that stays NaN, ends the run with an error.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from squall.protocol.core import (
    Effect, End, Event, Forget, MemberLost, MessageArrived, Node, Note, PublishSnapshot, Send, StartMember, Started,
    StopRequested, TimePassed,
)  # fmt: skip
from squall.protocol.leases import Ended, Leases
from squall.protocol.membership import Membership
from squall.protocol.messages import (
    Cover, Evaluate, Evaluated, Grant, Join, LeaseRequest, Left, Message, NonFinite, Progress, SnapshotTaken, Stats,
    Stop, TakeSnapshot, View, ViewSeen, Welcome,
)  # fmt: skip

STOP_WITHIN_S = 1.0  # after a user's stop, replicas that are still computing are not waited for
LOST_IN_A_ROW = 5  # a slot whose processes die so often without finishing a batch ends the run
LEASE_BATCHES_AT_MOST = 16


class Policy(msgspec.Struct, frozen=True):
    """What of a plan the coordinator must know."""

    replicas: int
    shards: int
    gathered: bool = False  # rounds: a grant for each exchange, and ticks for those without data
    bounded: bool = False  # a max delay: idle replicas take part so as not to hold others
    push_every: int = 1
    warm_start: int = 0  # examples that the first replica trains alone
    evaluate: bool = True  # there is a validation set
    evaluate_every_s: float | None = None  # beside the one after each epoch
    until: tuple[str, float] | None = None  # end when this metric is reached (loss: falls to)
    seconds: float | None = None  # of training
    snapshot_every_s: float | None = 60.0


class Phase(StrEnum):
    RUNNING = "running"
    STOPPING = "stopping"
    EVALUATING = "evaluating"
    SNAPSHOT = "snapshot"
    ENDED = "ended"


class Coordinator:
    def __init__(self, policy: Policy, leases: Leases, snapshots: int = 0) -> None:
        self.policy = policy
        self.leases = leases
        self.members = Membership(policy.shards)
        self.phase = Phase.RUNNING
        self.reason = ""
        self.error = ""
        self._shards = [Node("shard", i) for i in range(policy.shards)]
        self._evaluator = Node("evaluator", policy.replicas)
        self._started_s: float | None = None  # when the first replica was welcomed
        self._requests: dict[Node, int] = {}  # replica waiting for a grant -> clock asked for
        self._rounds: dict[int, dict[Node, Grant]] = {}  # gathered: what was dealt for the newest clocks
        self._newest_clock = 0
        self._joins: dict[Node, None] = {}  # joins that wait for the slot to be free
        self._fruitless: dict[int, int] = {}  # slot -> processes lost since its last finished batch
        self._epochs_seen = leases.epochs_done()
        self._evaluating: int | None = None  # number of the evaluation under way
        self._evaluations = 0
        self._evaluate_again = False
        self._evaluate_at: float | None = None
        self.snapshots = snapshots  # number of the newest
        self._taking: dict[int, SnapshotTaken] | None = None  # shard -> answer, of the snapshot under way
        self._taking_ledger: dict[str, object] = {}
        self._snapshot_at: float | None = None
        self._deadline: float | None = None  # of the stopping phase
        self._user_stop = False

    @property
    def wake_at(self) -> float | None:
        times = [self._deadline, self._snapshot_at, self._evaluate_at, self._end_of_time()]
        return min((t for t in times if t is not None), default=None)

    def on(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case MessageArrived(sender, message):
                self._on_message(sender, message, now, effects)
            case MemberLost(node, why):
                self._on_lost(node, why, now, effects)
            case StopRequested(why):
                self._user_stop = True
                self._stop(why, now, effects, deadline=now + STOP_WITHIN_S)
            case TimePassed():
                self._on_time(now, effects)
            case Started():
                pass
            case _:
                raise AssertionError(f"the coordinator does not know {event!r}")
        return effects

    def _on_message(self, sender: Node, message: Message, now: float, effects: list[Effect]) -> None:
        match message:
            case LeaseRequest(clock):
                self._requests[sender] = clock
                self._newest_clock = max(self._newest_clock, clock)
                self._grant_all(now, effects)
            case Progress(covers, stats):
                self._on_progress(sender, covers, stats, now, effects)
            case Join(pid):
                self._on_join(sender, pid, effects)
            case ViewSeen():
                self.members.seen(sender.index, message)
                self._on_view_seen(now, effects)
            case Left(covers, stats):
                self._on_progress(sender, covers, stats, now, effects)
                effects.append(Note("member", "left", node=sender))
                self._depart(sender, effects)
            case NonFinite():
                self._on_non_finite(sender, message, now, effects)
            case Evaluated():
                self._on_evaluated(message, now, effects)
            case SnapshotTaken():
                self._on_snapshot_taken(sender.index, message, now, effects)
            case _:
                raise AssertionError(f"the coordinator does not know {message!r}")

    def _on_time(self, now: float, effects: list[Effect]) -> None:
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._after_stopping(now, effects)
        end_of_time = self._end_of_time()
        if end_of_time is not None and now >= end_of_time:
            self._stop("the time given is over", now, effects)
        if self._snapshot_at is not None and now >= self._snapshot_at:
            self._take_snapshot(now, effects)
        if self._evaluate_at is not None and now >= self._evaluate_at:
            assert self.policy.evaluate_every_s is not None
            self._evaluate_at = now + self.policy.evaluate_every_s
            self._evaluate(effects)

    def _end_of_time(self) -> float | None:
        if self.policy.seconds is None or self._started_s is None or self.phase is not Phase.RUNNING:
            return None
        return self._started_s + self.policy.seconds

    # ------------------------------------------------------------ members

    def _on_join(self, node: Node, pid: int, effects: list[Effect]) -> None:
        effects.append(Note("member", f"joined {pid}", node=node))
        if node.role == "evaluator":
            self._evaluator = node
            if self._evaluating is not None:  # its predecessor was lost over it
                effects.append(Send(node, Evaluate(self._evaluating)))
        elif self.phase is not Phase.RUNNING:
            effects.append(Send(node, Stop()))
        else:
            self._joins[node] = None
            self._admit(effects)

    def _admit(self, effects: list[Effect]) -> None:
        for node in [node for node in self._joins if self.members.slot_free(node.index)]:
            del self._joins[node]
            self._show(self.members.join(node, self._newest_clock), effects)

    def _show(self, view: View, effects: list[Effect]) -> None:
        effects.extend(Send(shard, view) for shard in self._shards)

    def _depart(self, node: Node, effects: list[Effect]) -> None:
        self._requests.pop(node, None)
        self._joins.pop(node, None)
        view = self.members.depart(node)
        if view is not None:
            self._show(view, effects)

    def _on_view_seen(self, now: float, effects: list[Effect]) -> None:
        for node, applied in self.members.take_departed():
            for lease, upto in applied.items():
                self._close(self.leases.done(lease, upto, node), effects)
            for ended in self.leases.give_back(node):
                self._close(ended, effects)
            effects.append(Forget(node))
        for node, entry in self.members.take_joined():
            if self._started_s is None:
                self._begin(now, effects)
            if self.phase is Phase.RUNNING:
                effects.append(Send(node, Welcome(entry)))
            else:
                effects.append(Send(node, Stop()))
        self._admit(effects)
        self._grant_all(now, effects)
        self._look_for_end(now, effects)

    def _begin(self, now: float, effects: list[Effect]) -> None:
        self._started_s = now
        effects.append(Note("started", "training began"))
        if self.policy.snapshot_every_s is not None:
            self._snapshot_at = now + self.policy.snapshot_every_s
        if self.policy.evaluate and self.policy.evaluate_every_s is not None:
            self._evaluate_at = now + self.policy.evaluate_every_s

    def _on_lost(self, node: Node, why: str, now: float, effects: list[Effect]) -> None:
        if self.phase is Phase.ENDED:
            return
        effects.append(Note("lost", f"{node.role} {node.index}: {why}", node=node))
        if node.role == "shard":
            self._fail(f"shard {node.index} was lost ({why})", effects)
            return
        if node.role == "replica":
            self._depart(node, effects)
        else:
            effects.append(Forget(node))
        lost = self._fruitless[_slot(node)] = self._fruitless.get(_slot(node), 0) + 1
        if lost >= LOST_IN_A_ROW:
            self._fail(f"{node.role} {node.index} was lost {lost} times in a row, last: {why}", effects)
        elif node.role == "evaluator" or self.phase is Phase.RUNNING:
            effects.append(StartMember(Node(node.role, node.index, node.incarnation + 1)))
            effects.append(Note("replaced", f"{node.role} {node.index}", node=node))
        self._look_for_end(now, effects)

    # ------------------------------------------------------------ data

    def _grant_all(self, now: float, effects: list[Effect]) -> None:
        for node in list(self._requests):
            if node in self.members.live and self._may_grant():
                self._grant(node, self._requests[node], now, effects)

    def _may_grant(self) -> bool:
        """Rounds begin with all replicas and never while the members of a round could be in doubt."""
        if self.phase is not Phase.RUNNING:
            return False
        if not self.policy.gathered:
            return True
        return self.members.settled and (bool(self._rounds) or len(self.members.live) == self.policy.replicas)

    def _grant(self, node: Node, clock: int, now: float, effects: list[Effect]) -> None:
        if self.policy.gathered:
            grant = self._deal_round(clock, now).get(node) or Grant(clock, None)
        elif self._warming_up() and node != next(iter(sorted(self.members.live))):
            grant = Grant(clock, None)
        else:
            grant = Grant(clock, self.leases.take(node, self._lease_batches(), now))
        if grant.lease is None and not self.policy.gathered and not self.policy.bounded:
            return  # stays in `_requests` until something comes back or the run ends
        del self._requests[node]
        effects.append(Send(node, grant))

    def _deal_round(self, clock: int, now: float) -> dict[Node, Grant]:
        """One push's worth of batches for each member, in slot order; dealt when the first member asks."""
        dealt = self._rounds.get(clock)
        if dealt is None:
            dealt = self._rounds[clock] = {}
            workers = sorted(self.members.live)[: 1 if self._warming_up() else None]
            epoch = None
            for node in workers:
                lease = self.leases.take(node, self.policy.push_every, now, within_epoch=epoch)
                if lease is None:
                    break
                epoch = lease.epoch
                dealt[node] = Grant(clock, lease)
            for old in [c for c in self._rounds if c < clock - 4]:
                del self._rounds[old]
        return dealt

    def _lease_batches(self) -> int:
        """Long enough that asking costs little, short enough that all replicas end an epoch together."""
        share = self.leases.left_in_epoch() // (2 * self.policy.replicas)
        size = max(1, min(share, LEASE_BATCHES_AT_MOST))
        return max(self.policy.push_every, size - size % self.policy.push_every)

    def _warming_up(self) -> bool:
        return self.leases.trained < self.policy.warm_start

    def _on_progress(
        self, node: Node, covers: tuple[Cover, ...], stats: Stats, now: float, effects: list[Effect]
    ) -> None:
        if stats.exchanges or stats.batches:
            effects.append(Note("stats", node=node, stats=stats))
        if covers:
            self._fruitless[_slot(node)] = 0
        warming = self._warming_up()
        for cover in covers:
            self._close(self.leases.done(cover.lease, cover.upto, node), effects)
        if warming and not self._warming_up():
            self._grant_all(now, effects)
        epochs = self.leases.epochs_done()
        if epochs > self._epochs_seen:
            self._epochs_seen = epochs
            if not self.leases.finished():
                self._evaluate(effects)
        self._look_for_end(now, effects)

    def _close(self, ended: Ended | None, effects: list[Effect]) -> None:
        if ended is None:
            return
        lease, holder, granted_s, done = ended
        values: dict[str, float] = {
            "lease": lease.id, "epoch": lease.epoch, "start": lease.start, "stop": lease.stop,
            "granted_s": granted_s, "trained_stop": done,
        }  # fmt: skip
        effects.append(Note("lease", node=holder, values=values))

    def _on_non_finite(self, sender: Node, message: NonFinite, now: float, effects: list[Effect]) -> None:
        batch = f"examples {message.start} to {message.stop} of epoch {message.epoch} (lease {message.lease})"
        text = f"replica {sender.index}: NaN or Inf in the loss or gradient of {batch}"
        effects.append(Note("nonfinite", text + (", twice" if message.final else "; not applied, tried again")))
        if message.final:
            self.error = text + ", and again when it was tried a second time; the weights before it are kept"
            self._user_stop = True
            self._stop(self.error, now, effects, deadline=now + STOP_WITHIN_S)

    # ------------------------------------------------------------ evaluation

    def _evaluate(self, effects: list[Effect]) -> None:
        if not self.policy.evaluate:
            return
        if self._evaluating is not None:
            self._evaluate_again = True
            return
        self._evaluating = self._evaluations
        self._evaluations += 1
        effects.append(Send(self._evaluator, Evaluate(self._evaluating)))
        effects.append(Note("evaluating", values={"number": self._evaluating, "trained": self.leases.trained}))

    def _on_evaluated(self, message: Evaluated, now: float, effects: list[Effect]) -> None:
        if message.number != self._evaluating:
            return
        self._evaluating = None
        self._fruitless[_slot(self._evaluator)] = 0
        for name, value in message.values.items():
            values: dict[str, float] = {"number": message.number, "updates": message.updates, "value": value}
            effects.append(Note("metric", name, values=values))
        if self.phase is Phase.RUNNING:
            why = reached(self.policy.until, message.values)
            if why:
                effects.append(Note("reached", why))
                self._stop(why, now, effects)
            elif self._evaluate_again:
                self._evaluate_again = False
                self._evaluate(effects)
        elif self.phase is Phase.EVALUATING:
            if self._evaluate_again:
                self._evaluate_again = False
                self._evaluate(effects)
            else:
                self._close_with_snapshot(now, effects)

    # ------------------------------------------------------------ snapshots

    def _take_snapshot(self, now: float, effects: list[Effect]) -> None:
        self._snapshot_at = None
        if self._taking is not None:
            return
        self.snapshots += 1
        self._taking = {}
        self._taking_ledger = self.leases.state()
        effects.extend(Send(shard, TakeSnapshot(self.snapshots)) for shard in self._shards)

    def _on_snapshot_taken(self, shard: int, message: SnapshotTaken, now: float, effects: list[Effect]) -> None:
        if self._taking is None or message.number != self.snapshots:
            return
        self._taking[shard] = message
        if len(self._taking) < self.policy.shards:
            return
        answers = [self._taking[i] for i in range(self.policy.shards)]
        self._taking = None
        self._publish(answers, effects)
        if self.policy.snapshot_every_s is not None and self.phase is Phase.RUNNING:
            self._snapshot_at = now + self.policy.snapshot_every_s
        if self.phase is Phase.SNAPSHOT:
            if self._closing:
                self._end(effects)
            else:
                self._closing = True
                self._take_snapshot(now, effects)

    _closing = False  # the snapshot under way is the last

    def _publish(self, answers: list[SnapshotTaken], effects: list[Effect]) -> None:
        failed = [answer.error for answer in answers if answer.error]
        if failed:
            effects.append(Note("error", f"snapshot {self.snapshots} could not be written: {failed[0]}"))
            return
        covers = [{cover.lease: cover.upto for cover in answer.progress} for answer in answers]
        common = {
            str(lease): min(c[lease] for c in covers) for lease in covers[0] if all(lease in c for c in covers)
        }
        versions = tuple(answer.version for answer in answers)
        effects.append(PublishSnapshot(self.snapshots, self._taking_ledger, versions, common))

    # ------------------------------------------------------------ the end

    def _look_for_end(self, now: float, effects: list[Effect]) -> None:
        if self.phase is Phase.RUNNING and self.leases.finished():
            self._stop("all data is trained", now, effects)
        elif self.phase is Phase.STOPPING and not self.members.live and self.members.settled:
            self._after_stopping(now, effects)

    def _stop(self, reason: str, now: float, effects: list[Effect], deadline: float | None = None) -> None:
        if self.phase is not Phase.RUNNING:
            if deadline is not None and self.phase is not Phase.ENDED:  # the user is in a hurry
                self._deadline = deadline
            return
        self.phase = Phase.STOPPING
        self.reason = reason
        self._deadline = deadline
        self._snapshot_at = self._evaluate_at = None
        for node in [*self.members.live, *self._joins]:
            effects.append(Send(node, Stop()))
        self._look_for_end(now, effects)

    def _after_stopping(self, now: float, effects: list[Effect]) -> None:
        self._deadline = None
        if self.policy.evaluate and not self._user_stop:
            self.phase = Phase.EVALUATING
            self._evaluate(effects)
        else:
            self._close_with_snapshot(now, effects)

    def _close_with_snapshot(self, now: float, effects: list[Effect]) -> None:
        if self.phase is Phase.SNAPSHOT:
            return
        self.phase = Phase.SNAPSHOT
        self._closing = self._taking is None  # one under way began too early: another follows it
        self._take_snapshot(now, effects)

    def _fail(self, error: str, effects: list[Effect]) -> None:
        self.error = self.reason = error
        self._end(effects)

    def _end(self, effects: list[Effect]) -> None:
        self.phase = Phase.ENDED
        self._deadline = self._snapshot_at = self._evaluate_at = None
        effects.extend(Send(shard, Stop()) for shard in self._shards)
        effects.append(Send(self._evaluator, Stop()))
        effects.append(End(self.reason, self.error))


def reached(until: tuple[str, float] | None, values: dict[str, float]) -> str:
    """Why the run may end, or nothing. A loss is to fall to its target, everything else to rise."""
    if until is None:
        return ""
    name, target = until
    value = values[name]
    there = value <= target if name == "loss" else value >= target
    return f"{name} {value:.4f} reached {target:g}" if there else ""


def _slot(node: Node) -> int:
    """Slots count replicas from 0; the evaluator has one of its own."""
    return node.index if node.role == "replica" else -1
