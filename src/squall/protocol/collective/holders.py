"""Who of a run of all-reduce has the weights: who shows and saves them, who may leave with them, and how they stay.

There are no shards, so replicas have them. What needs weights that belong to the ledger waits for the end of the rounds
that are under way.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from squall.protocol.collective.order import strangers
from squall.protocol.collective.rounds import Rounds
from squall.protocol.collective.tries import Tries
from squall.protocol.coordinator import Coordinator
from squall.protocol.effects import Cause, Effect, Send
from squall.protocol.leases import Leases
from squall.protocol.messages import SnapshotTaken, Stop
from squall.protocol.nodes import NURSERY, Node
from squall.protocol.policy import Policy


class WeightHolders(Coordinator):
    def __init__(self, policy: Policy, leases: Leases, clock: int, snapshots: int, divided: bool) -> None:
        """`clock` is that of the weights that all begin with; `divided`: each has a share of the optimizer's state."""
        super().__init__(policy, snapshots)
        self._divided = divided
        self.leases, self.rounds = leases, Rounds(leases, clock)
        self._formed = 0  # number of the view whose members were told to form a group
        self._group: dict[Node, None] = {}  # those members, in their order
        self._whole = 0  # alike, of the newest group of which all have finished a round, so that each has its share
        self._torn = False  # a member was lost, or the group has broken: what was dealt is not waited for
        self._tries = Tries()  # of groups
        self._snapshot_due = False
        self._hasty = False  # members that do not answer are not waited for any more
        self._released: dict[Node, bool] = {}  # members that shall leave between two rounds, and whether they were told

    @abstractmethod
    def _tear(self, effects: list[Effect]) -> None:
        """The group shall form anew, whatever is under way."""

    @abstractmethod
    def _settle(self, effects: list[Effect]) -> None:
        """What one member at least has finished counts, and all else that was dealt is to be dealt again."""

    @abstractmethod
    def _report(self, effects: list[Effect]) -> None:
        """What members have done since the last report goes into the record."""

    @property
    def trained(self) -> int:
        return self.leases.trained

    @property
    def _holders(self) -> Sequence[Node]:
        return list(self.members.live)

    @property
    def _source(self) -> Node:
        """The first live member with the newest weights, on the coordinator's machine if there is one.

        Where groups break it is the next one in turn: what the first gives may be of no use.
        """
        having = [node for node in self.members.live if self.rounds.clock_of(node) == self.rounds.newest]
        having.sort(key=lambda node: (self._placing.on.get(node) != NURSERY.index, node))
        return having[self._tries.in_a_row % len(having)]

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
        return "all replicas" if all_leave and self.rounds.newest > self.rounds.first else ""

    @property
    def _handed_over(self) -> bool:
        """Somebody who stays has the newest weights; and each its share, since the last one has left."""
        if self.rounds.newest <= self.rounds.first:
            return True
        if self._divided and self._whole != self.members.number:
            return False
        clocks = [self.rounds.clock_of(node) for node in self.members.live if node not in self._released]
        return max(clocks, default=-1) >= self.rounds.newest

    def _take_snapshot(self, effects: list[Effect]) -> None:
        self._snapshot_due = not self._snapshots.under_way
        if self._snapshot_due and self._quiet and (self._formed == self.members.number or not self._divided):
            self._snapshot_due = False
            self._report(effects)
            self._snapshots.take(self._writers, self._ledger(), effects)

    @property
    def _writers(self) -> list[Node]:
        """Who writes a snapshot: in their order those who each have a share, or one for all."""
        return list(self._group) if self._divided else [self._source]

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
            self.rounds.doubt(self._group)
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

    def _see_off_released(self, effects: list[Effect]) -> None:
        """No round is dealt until they have left. Neighbours would take a share of the optimizer's state with them."""
        if self._quiet and self._handed_over and not (self._divided and any(self._released.values())):
            leaving = [node for node, told in self._released.items() if not told]
            if self._divided and self.rounds.newest > self.rounds.first:
                leaving = strangers(list(self._group), leaving)
            effects.extend(Send(node, Stop()) for node in leaving)
            self._released |= dict.fromkeys(leaving, True)
