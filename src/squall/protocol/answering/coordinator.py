"""The coordinator where nothing is trained: it deals the examples, each to be answered once.

There are no weights that anybody has to hand over or save. What counts is on the disk before the replica tells of it,
so the files are the snapshot, and a run goes on from what is in them. Nobody works with another replica, so nobody has
to see who is a member: what a lost replica has not told of is dealt again at once. It may have written that; then the
same answers are written once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from squall.protocol.answering.effects import WriteAnswers
from squall.protocol.answering.messages import AnswersPiece, NotKept
from squall.protocol.effects import Cause, Effect, Send
from squall.protocol.events import AnswersTaken, Event
from squall.protocol.exchanges import Exchanges
from squall.protocol.frames import Message
from squall.protocol.leases import Leases
from squall.protocol.loop_coordinator import LoopCoordinator
from squall.protocol.machine import Refusal
from squall.protocol.membership import Membership
from squall.protocol.messages import Join, PieceKept
from squall.protocol.nodes import NURSERY, Node
from squall.protocol.notes import AnswersFound
from squall.protocol.policy import Policy


class AnswerCoordinator(LoopCoordinator):
    def __init__(self, policy: Policy, leases: Leases, found: Sequence[tuple[int, int]] = ()) -> None:
        """`found`: ranges of which there were answers already, which is the ledger's beginning."""
        super().__init__(policy, Exchanges(), leases)
        self.members = Membership(0, observed=False)
        self._found = found
        self._arriving: dict[Node, AnswersPiece] = {}  # of files that have come in part, the last piece
        self._came: dict[Node, int] = {}  # bytes of these

    def _listen(self, now: float, effects: list[Effect]) -> None:
        effects.append(AnswersFound(tuple(self._found), self.leases.trained))
        super()._listen(now, effects)

    def _over(self) -> tuple[Cause, str] | None:
        return (Cause.DATA, "all examples are answered") if self.leases.over() else None

    def _show_view(self, effects: list[Effect]) -> None:
        self.members.next_view()

    def _on_join(self, node: Node, message: Join, now: float, effects: list[Effect]) -> None:
        super()._on_join(node, message, now, effects)
        self._on_view_seen(now, effects)

    def _depart(self, node: Node, now: float, effects: list[Effect]) -> bool:
        departs = super()._depart(node, now, effects)
        self._on_view_seen(now, effects)
        return departs

    # ------------------------------------------------------------ answers from other machines

    def on(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if isinstance(event, AnswersTaken):
            self._unwritten.pop(event.node, None)
        match event:
            case AnswersTaken(error=error) if error:
                self._fail(error, effects)
            case AnswersTaken(node, lease) if node in self.members.live:
                effects.append(Send(node, PieceKept(lease)))
            case AnswersTaken():
                pass
            case _:
                return super().on(event, now)
        return effects

    def _on_work(self, sender: Node, message: Message, now: float, effects: list[Effect]) -> None:
        match message:
            case AnswersPiece():
                self._on_piece(sender, message, effects)
            case NotKept() if self._machine_of(sender) not in (NURSERY.index, None):
                raise Refusal("it writes no files: they are written here")
            case NotKept(why):
                self._fail(why, effects)
            case _:
                super()._on_work(sender, message, now, effects)

    def _on_piece(self, sender: Node, piece: AnswersPiece, effects: list[Effect]) -> None:
        held = self.leases.held.get(piece.lease)
        if sender not in self.members.live or held is None or held.holder != sender:
            return  # it was lost while this was on its way
        begun = self._arriving.get(sender, piece)
        wanted = msgspec.structs.replace(begun, at=self._came.get(sender, 0), size=piece.size, number=piece.number)
        within = held.done <= piece.start < piece.stop <= held.lease.stop and piece.at + piece.size <= piece.total
        if piece != wanted or not within:
            raise Refusal(f"it sends {piece}, and has {held.lease}, of which {wanted} would come next")
        self._arriving[sender], self._came[sender] = piece, piece.at + piece.size
        if self._came[sender] == piece.total:
            del self._arriving[sender], self._came[sender]
        write = self._unwritten[sender] = WriteAnswers(sender, piece)
        effects.append(write)

    def _forget(self, node: Node) -> None:
        super()._forget(node)
        self._arriving.pop(node, None)
        self._came.pop(node, None)

    def _close_with_snapshot(self, now: float, effects: list[Effect]) -> None:
        """What would be saved is on the disk."""
        self._end(effects)
