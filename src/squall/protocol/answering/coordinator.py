"""The coordinator where nothing is trained: it deals the examples, each to be answered once.

There are no weights that anybody has to hand over or save. What counts is on the disk before the replica tells of it,
so the files are the snapshot, and a run goes on from what is in them. Nobody works with another replica, so nobody has
to see who is a member: what a lost replica has not told of is dealt again at once. It may have written that; then the
same answers are written once more.
"""

from __future__ import annotations

from collections.abc import Sequence

from squall.protocol.effects import Effect
from squall.protocol.exchanges import Exchanges
from squall.protocol.leases import Leases
from squall.protocol.loop_coordinator import LoopCoordinator
from squall.protocol.membership import Membership
from squall.protocol.messages import Join
from squall.protocol.nodes import Node
from squall.protocol.notes import AnswersFound
from squall.protocol.policy import Policy


class AnswerCoordinator(LoopCoordinator):
    def __init__(self, policy: Policy, leases: Leases, found: Sequence[tuple[int, int]] = ()) -> None:
        """`found`: ranges of which there were answers already, which is the ledger's beginning."""
        super().__init__(policy, Exchanges(), leases)
        self.members = Membership(0, observed=False)
        self._found = found

    def _listen(self, now: float, effects: list[Effect]) -> None:
        effects.append(AnswersFound(tuple(self._found), self.leases.trained))
        super()._listen(now, effects)

    def _show_view(self, effects: list[Effect]) -> None:
        self.members.next_view()

    def _on_join(self, node: Node, message: Join, now: float, effects: list[Effect]) -> None:
        super()._on_join(node, message, now, effects)
        self._on_view_seen(now, effects)

    def _depart(self, node: Node, now: float, effects: list[Effect]) -> bool:
        departs = super()._depart(node, now, effects)
        self._on_view_seen(now, effects)
        return departs

    def _close_with_snapshot(self, now: float, effects: list[Effect]) -> None:
        """What would be saved is on the disk."""
        self._end(effects)
