"""All-reduce's coordinator: there are no shards, so replicas hold the weights, and a round needs them all.

It deals rounds to the group, some ahead. Whatever changes the group, or has to see weights that belong to its ledger,
happens between two rounds: dealing ceases until all that was dealt counts. Only a death tears a round: the survivors
leave the group, say how far they have come, and form the next one with the newest weights among them.
"""

from __future__ import annotations

import math

from squall.protocol.closing import Phase
from squall.protocol.collective.holders import WeightHolders
from squall.protocol.collective.messages import Broken, Finished, Form, Place, Shown, Turn
from squall.protocol.collective.order import spread
from squall.protocol.collective.rounds import AHEAD, LOADED, Round
from squall.protocol.collective.tries import BROKEN_IN_A_ROW
from squall.protocol.effects import Effect, Send
from squall.protocol.frames import Message
from squall.protocol.leases import Leases
from squall.protocol.machine import Refusal
from squall.protocol.membership import Applied
from squall.protocol.messages import Join, Left, Progress, Skip, SkipNoted, Stats, ViewSeen
from squall.protocol.nodes import Node
from squall.protocol.notes import BatchLeftOut
from squall.protocol.policy import Policy
from squall.protocol.reports import REPORT_EVERY_S, together

LOST = "all replicas that had the newest weights were lost"
SHARE_LOST = "both replicas that had a share of the optimizer's state were lost"


class CollectiveCoordinator(WeightHolders):
    def __init__(
        self, policy: Policy, leases: Leases, clock: int = 0, snapshots: int = 0, divided: bool = False
    ) -> None:  # fmt: skip
        super().__init__(policy, leases, clock, snapshots, divided)
        self._ahead = LOADED + policy.loaders if policy.loaders else AHEAD  # rounds
        self._gone = 0  # members since the last round that all have finished; one takes no share of the state with it
        self._done: dict[Node, Stats] = {}  # what members have done since the last report
        self._report_at = 0.0
        self._addresses: dict[Node, str] = {}  # where replicas are called by others

    @property
    def wake_at(self) -> float | None:
        times = (super().wake_at, self._tries.again_at)
        return min((t for t in times if t is not None), default=None)

    def _on_time(self, now: float, effects: list[Effect]) -> None:
        super()._on_time(now, effects)
        if self._tries.due(now):
            self._tear(effects)

    def _end(self, effects: list[Effect], remark: str = "") -> None:
        self._tries.over()
        super()._end(effects, remark)

    # ------------------------------------------------------------ members

    def _on_join(self, node: Node, message: Join, now: float, effects: list[Effect]) -> None:
        super()._on_join(node, message, now, effects)
        self._addresses[node] = message.address

    def _is_called(self, node: Node) -> bool:
        return node.role == "replica" and bool(self.policy.rooms)

    def _forget(self, node: Node) -> None:
        self.rounds.forget(node)
        self._addresses.pop(node, None)
        self._released.pop(node, None)
        if node in self._group:
            self._torn, self._gone = True, self._gone + 1
            self._tries.over()  # who was lost has broken it

    def _depart(self, node: Node, now: float, effects: list[Effect]) -> bool:
        departs = super()._depart(node, now, effects)
        trained = self.rounds.counted > self.rounds.first or self.phase is not Phase.RUNNING
        if departs and trained and not self.members.live:
            self._go_back(LOST, effects)
        elif departs:
            self._on_view_seen(now, effects)  # perhaps nobody else was waited for
        return departs

    @property
    def view_waits(self) -> bool:
        """The first view has everybody; a later one comes between two rounds, unless a member is lost."""
        if not self.members.number and self.phase is Phase.RUNNING:
            expected = self.policy.replicas - len(self._replacing.given_up) - self._placing.replicas_waiting
            return len(self.members.live) < expected
        return bool(self.rounds.open) and not self._torn

    def _tear(self, effects: list[Effect]) -> None:
        self._torn = True
        self._tries.again_at = None
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
                if sender not in self._group:
                    raise Refusal(f"it has finished round {clock}, and is in no group")
                self.rounds.told(sender, clock, stats)
                counted = self.rounds.count()
                if counted and self._group.keys() <= self.members.live.keys():
                    self._gone, self._whole = 0, self._formed
                self._count(counted, effects)
                if now >= self._report_at or self._over() is not None:
                    self._report_at = now + REPORT_EVERY_S
                    self._report(effects)
                self._proceed(now, effects)
                self._look_for_end(now, effects)
            case Skip(lease):
                held = self.leases.held.get(lease)
                if held is not None and held.holder == sender:  # else it is dealt to others by now
                    self.rounds.leaves_out(sender, message)
                    effects.append(BatchLeftOut(sender, message))
                effects.append(Send(sender, SkipNoted()))
            case Shown():
                self._evaluations.shown(sender, message, effects)
            case Broken(lost=True) if self._gone > 1:  # of whatever group: those who are live now were all in it
                self._go_back(SHARE_LOST, effects)
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
        waits = waits or self._tries.again_at is not None
        while not waits and self.phase is Phase.RUNNING and len(self.rounds.open) < self._ahead:
            each = self.rounds.deal(self.members.live, now)
            if each is None:
                return
            clock, examples = self.rounds.dealt, each.examples
            effects.extend(Send(node, Turn(clock, lease, examples)) for node, lease in each.dealt.items())

    def _form(self, now: float, effects: list[Effect]) -> None:
        """Every live member has left its old group, and has told how far it has come."""
        self.rounds.doubt(self._group)
        number, clock, source = self.members.number, self.rounds.newest, self._source
        if clock < self.rounds.counted:
            self._go_back(LOST, effects)
            return
        members = sorted(self.members.live)
        places = tuple(Place(self._placing.on.get(node, 0), self._addresses.get(node, "")) for node in members)
        order = spread([place.machine for place in places]) if self.policy.rooms else range(len(members))
        self._formed, self._group, self._torn = number, dict.fromkeys(members[at] for at in order), False
        self._tries.again_at, self.rounds.base = None, clock
        self._settle(effects)
        behind = tuple(node for node in self.members.live if self.rounds.clock_of(node) < clock)
        form = Form(number, clock, self.trained, source, behind, places if self.policy.rooms else ())
        effects.extend(Send(node, form) for node in members)
        self._evaluations.ask_of(source, self.members.live, effects)
        if self._snapshots.under_way and (self._divided or set(self._snapshots.awaited) - set(self.members.live)):
            self._snapshots.ask_again(self._writers, effects)
            self._give_time(now)
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
            self._tries.in_a_row = 0
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
        """Mostly a member was lost, which its nursery will tell; else the same members try again, after a pause."""
        if not number == self._formed == self.members.number:
            return
        if self._tries.again_at is None and not self._tries.broke(now):
            text = f"replicas could not form a group {BROKEN_IN_A_ROW} times in a row"
            self._fail(f"{text}, last: {sender}: {why}", effects)

    def _on_seen(self, sender: Node, message: ViewSeen, now: float, effects: list[Effect]) -> None:
        if sender not in self.members.live:
            return  # it was lost while this was on its way
        self.members.check_seen(sender, message)
        if not self._hasty:
            self.rounds.finished(sender, message.clock)
        if self.phase is Phase.SNAPSHOT and self._hurried and self._snapshot_due:
            self._do_without_silent(effects)
            self._take_snapshot(effects)
        super()._on_seen(sender, message, now, effects)

    def _report(self, effects: list[Effect]) -> None:
        for node, stats in self._done.items():
            self._note_stats(node, stats, effects)
        self._done.clear()
