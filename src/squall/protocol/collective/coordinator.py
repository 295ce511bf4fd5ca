"""All-reduce's coordinator: there are no shards, so replicas hold the weights, and a round needs them all.

It deals rounds to the group, some ahead. Whatever changes the group, or has to see weights that belong to its ledger,
happens between two rounds: dealing ceases until all that was dealt counts. Only a death tears a round: the survivors
leave the group, say how far they have come, and form the next one with the newest weights among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from squall.protocol.closing import Phase
from squall.protocol.collective.messages import Broken, Finished, Form, Place, Shown, Turn
from squall.protocol.collective.rounds import AHEAD, Round, Rounds
from squall.protocol.coordinator import Coordinator
from squall.protocol.effects import Cause, Effect, Send
from squall.protocol.frames import Message
from squall.protocol.leases import Leases
from squall.protocol.machine import Refusal
from squall.protocol.membership import Applied
from squall.protocol.messages import Join, Left, Progress, SnapshotTaken, Stats, Stop, ViewSeen
from squall.protocol.nodes import NURSERY, Node
from squall.protocol.policy import Policy
from squall.protocol.reports import REPORT_EVERY_S, together

_REMEDY = "were lost; `squall resume` goes on from the last snapshot"
LOST = f"all replicas that had the newest weights {_REMEDY}"
SHARE_LOST = f"both replicas that had a share of the optimizer's state {_REMEDY}"
BROKEN_IN_A_ROW = 5  # groups that finish no round: something is wrong that another try does not remove


class CollectiveCoordinator(Coordinator):
    def __init__(
        self, policy: Policy, leases: Leases, clock: int = 0, snapshots: int = 0, divided: bool = False
    ) -> None:  # fmt: skip
        """`clock` is that of the weights that all begin with; `divided`: each has a share of the optimizer's state."""
        super().__init__(policy, snapshots)
        self._divided = divided
        self.leases, self.rounds, self._first = leases, Rounds(leases, clock), clock
        self._formed = 0  # number of the view whose members were told to form a group
        self._group: dict[Node, None] = {}  # those members
        self._torn = False  # a member was lost, or the group has broken: what was dealt is not waited for
        self._broken = 0  # groups in a row that have finished no round, though nobody was lost
        self._snapshot_due = False
        self._hasty = False  # members that do not answer are not waited for any more
        self._released: dict[Node, bool] = {}  # members that shall leave between two rounds, and whether they were told
        self._done: dict[Node, Stats] = {}  # what members have done since the last report
        self._report_at = 0.0
        self._addresses: dict[Node, str] = {}  # where replicas are called by others

    # ------------------------------------------------------------ what the base asks, and then rounds

    @property
    def trained(self) -> int:
        return self.leases.trained

    @property
    def _holders(self) -> Sequence[Node]:
        return list(self.members.live)

    @property
    def _source(self) -> Node:
        """The first live member with the newest weights, on the coordinator's machine if there is one."""
        having = [node for node in self.members.live if self.rounds.clock_of(node) == self.rounds.newest]
        return min(having, key=lambda node: (self._placing.on.get(node) != NURSERY.index, node))

    @property
    def _quiet(self) -> bool:
        """Nothing that was dealt is under way, and all live members agree who they are, or are not waited for."""
        return not self.rounds.open and (self.members.settled or self._hasty) and bool(self.members.live)

    @property
    def _dismissed(self) -> bool:
        return self._quiet or not self.members.live

    def _dismiss(self, effects: list[Effect]) -> None:
        """Members stay, with the weights."""
        effects.extend(Send(node, Stop()) for node in self._joins)
        self._show_view(effects)

    def _release(self, node: Node, effects: list[Effect]) -> None:
        self._released[node] = False
        self._see_off_released(effects)

    def _kept_by(self, nodes: list[Node]) -> str:
        all_leave = self.members.live.keys() <= {*nodes, *self._released}
        return "all replicas" if all_leave and self.rounds.newest > self._first else ""

    @property
    def _handed_over(self) -> bool:
        """Somebody who stays has the newest weights."""
        clocks = [self.rounds.clock_of(node) for node in self.members.live if node not in self._released]
        return max(clocks, default=-1) >= max(self.rounds.newest, self._first) or self.rounds.newest <= self._first

    def _take_snapshot(self, effects: list[Effect]) -> None:
        self._snapshot_due = not self._snapshots.under_way
        if self._snapshot_due and self._quiet and (self._formed == self.members.number or not self._divided):
            self._snapshot_due = False
            self._report(effects)
            self._snapshots.take(self._writers, self._ledger(), effects)

    @property
    def _writers(self) -> list[Node]:
        """Who writes a snapshot: in their order those who each have a share, or one for all."""
        return sorted(self._group) if self._divided else [self._source]

    def _on_snapshot_taken(self, shard: Node, message: SnapshotTaken, now: float, effects: list[Effect]) -> None:
        super()._on_snapshot_taken(shard, message, now, effects)
        self._proceed(now, effects)

    def _after_stopping(self, now: float, effects: list[Effect]) -> None:
        self._report(effects)
        super()._after_stopping(now, effects)

    def _close_with_snapshot(self, now: float, effects: list[Effect]) -> None:
        if self._hurried:
            self._do_without_silent(effects)
        super()._close_with_snapshot(now, effects)
        if not self.members.live:
            self._leave_unsaved(effects)

    def _do_without_silent(self, effects: list[Effect]) -> None:
        """Time is over: what those have who have left the group is saved, and others are not waited for."""
        clocks = {node: self.rounds.clock_of(node) for node in self.members.live if self.members.has_seen(node)}
        if self._torn and max(clocks.values(), default=-1) >= self.rounds.counted and not self._divided:
            self._hasty = True
            for node in [node for node in self.members.live if node not in clocks]:
                self.rounds.forget(node)
            self._settle(effects)

    def _hurry(self, reason: str, now: float, effects: list[Effect], wanted: bool = False) -> None:
        """Rounds that are not finished are not waited for."""
        super()._hurry(reason, now, effects, wanted)
        if self.rounds.open and not wanted:
            self._tear(effects)

    def _over(self) -> tuple[Cause, str] | None:
        return self.leases.over() if self._begun else None  # who has the weights must have come

    def _ledger(self) -> dict[str, object]:
        return self.leases.state()

    def _on_join(self, node: Node, message: Join, now: float, effects: list[Effect]) -> None:
        self._addresses[node] = message.address
        super()._on_join(node, message, now, effects)

    def _forget(self, node: Node) -> None:
        self.rounds.forget(node)
        self._addresses.pop(node, None)
        self._released.pop(node, None)
        if node in self._group:
            self._torn, self._broken = True, 0  # who was lost has broken it

    def _depart(self, node: Node, now: float, effects: list[Effect]) -> bool:
        departs = super()._depart(node, now, effects)
        trained = self.rounds.counted > self._first or self.phase is not Phase.RUNNING
        if departs and trained and not self.members.live:
            self._fail(LOST, effects)
        elif departs:
            self._on_view_seen(now, effects)  # perhaps nobody else was waited for
        return departs

    @property
    def view_waits(self) -> bool:
        """The first view has everybody; a later one comes between two rounds, unless a member is lost."""
        if not self.members.number and self.phase is Phase.RUNNING:
            expected = self.policy.replicas - len(self._replacing.given_up) - len(self._placing.waiting)
            return len(self.members.live) < expected
        return bool(self.rounds.open) and not self._torn

    def _tear(self, effects: list[Effect]) -> None:
        """The group shall form anew, whatever is under way."""
        self._torn = True
        self.members.renew()
        self._show_view(effects)

    def _welcome(self, node: Node, entry: int, effects: list[Effect]) -> None:
        """`Form` will be its welcome."""

    def _take_back(self, node: Node, applied: list[Applied], effects: list[Effect]) -> None:
        """Its batches count with their rounds."""

    def _on_work(self, sender: Node, message: Message, now: float, effects: list[Effect]) -> None:
        late = self._hasty and isinstance(message, Finished)
        if isinstance(message, Progress | Left) or sender not in self.members.live or late:
            return  # of one that was lost, or is not waited for, nothing counts that no survivor has
        match message:
            case Finished(clock, stats):
                if not self.rounds.clock_of(sender) < clock <= self.rounds.dealt:
                    raise Refusal(f"it has finished round {clock}, and was to do {self.rounds.clock_of(sender) + 1}")
                self.rounds.told(sender, clock, stats)
                self._count(self.rounds.count(), effects)
                if now >= self._report_at or self._over() is not None:
                    self._report_at = now + REPORT_EVERY_S
                    self._report(effects)
                self._proceed(now, effects)
                self._look_for_end(now, effects)
            case Shown():
                self._evaluations.shown(sender, message, effects)
            case Broken(lost=True) if self._divided:  # of whatever group: those who are live now were all in it
                self._fail(SHARE_LOST, effects)
            case Broken(number, why):
                self._on_broken(sender, number, why, now, effects)
            case _:
                raise AssertionError(f"the coordinator does not know {message!r}")

    def _proceed(self, now: float, effects: list[Effect]) -> None:
        """What waits for the end of the rounds under way; else the next rounds."""
        self._see_off_released(effects)
        if not self.rounds.open:
            self._show_view(effects)
        if not self.members.settled or not self.members.live or not self._begun:
            return
        if self._formed != self.members.number:
            self._form(now, effects)
        if self._snapshot_due:
            self._take_snapshot(effects)
        waits = self._snapshot_due or self._snapshots.under_way or (self._released and self._handed_over)
        while not waits and self.phase is Phase.RUNNING and len(self.rounds.open) < AHEAD:
            each = self.rounds.deal(self.members.live, now)
            if each is None:
                return
            clock, examples = self.rounds.dealt, each.examples
            effects.extend(Send(node, Turn(clock, lease, examples)) for node, lease in each.dealt.items())

    def _form(self, now: float, effects: list[Effect]) -> None:
        """Every live member has left its old group, and has told how far it has come."""
        number, clock, source = self.members.number, self.rounds.newest, self._source
        if clock < self.rounds.counted:
            self._fail(LOST, effects)
            return
        self._formed, self._group, self._torn = number, dict.fromkeys(self.members.live), False
        self._settle(effects)
        behind = tuple(node for node in self.members.live if self.rounds.clock_of(node) < clock)
        members = sorted(self.members.live)
        places = tuple(Place(self._placing.on.get(node, 0), self._addresses.get(node, "")) for node in members)
        form = Form(number, clock, self.trained, source, behind, places if self.policy.rooms else ())
        effects.extend(Send(node, form) for node in members)
        self._evaluations.ask_of(source, self.members.live, effects)
        if self._snapshots.under_way and (self._divided or set(self._snapshots.awaited) - set(self.members.live)):
            self._snapshots.ask_again(self._writers, effects)
        self._look_for_end(now, effects)

    def _settle(self, effects: list[Effect]) -> None:
        """What one member at least has finished counts, and all else that was dealt is to be dealt again."""
        self._count(self.rounds.settle(), effects)
        for lease in self.rounds.give_back():
            if (held := self.leases.held.get(lease.id)) is not None:
                effects.extend(self.leases.give_back(held.holder))

    def _count(self, rounds: list[Round], effects: list[Effect]) -> None:
        """Their examples are trained, also those of a member that did not live to tell."""
        for each in rounds:
            self._broken = 0
            for node, lease in each.dealt.items():
                stats = each.stats(node)
                self._done[node] = together(self._done[node], stats) if node in self._done else stats
                if lease is not None:
                    self._replacing.fruitful(node)
                    ended = self.leases.done(lease.id, lease.stop, node)
                    assert ended is not None
                    effects.append(ended)
        if self.leases.epoch_ended():
            self._report_at = -math.inf
            if self.policy.evaluate and self._over() is None:
                self._evaluations.ask(effects)

    def _on_broken(self, sender: Node, number: int, why: str, now: float, effects: list[Effect]) -> None:
        """Mostly a member was lost, which its nursery will tell; else the same members try again."""
        if not number == self._formed == self.members.number:
            return
        self._broken += 1
        if self._broken < BROKEN_IN_A_ROW:
            self._tear(effects)
        else:
            text = f"replicas could not form a group {BROKEN_IN_A_ROW} times in a row"
            self._fail(f"{text}, last: {sender}: {why}", effects)

    def _see_off_released(self, effects: list[Effect]) -> None:
        if self._quiet and self._handed_over:
            effects.extend(Send(node, Stop()) for node, told in self._released.items() if not told)
            self._released = dict.fromkeys(self._released, True)  # no round is dealt until they have left

    def _on_seen(self, sender: Node, message: ViewSeen, now: float, effects: list[Effect]) -> None:
        if sender not in self.members.live:
            return  # it was lost while this was on its way
        if not self._hasty:
            if message.clock > self.rounds.dealt:
                raise Refusal(f"it has finished round {message.clock}, and {self.rounds.dealt} were dealt")
            self.rounds.finished(sender, message.clock)
        if self.phase is Phase.SNAPSHOT and self._hurried and self._snapshot_due:
            self._do_without_silent(effects)
            self._take_snapshot(effects)
        super()._on_seen(sender, message, now, effects)

    def _report(self, effects: list[Effect]) -> None:
        for node, stats in self._done.items():
            self._note_stats(node, stats, effects)
        self._done.clear()
