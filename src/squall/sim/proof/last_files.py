"""What somebody beside the coordinator sees of a snapshot's files on their way to it."""

from __future__ import annotations

import math

from squall.protocol.effects import Effect, PublishSnapshot, Transmit
from squall.protocol.events import Event, FrameArrived, PeersHeard
from squall.protocol.messages import SnapshotPiece, SnapshotTaken, TakeSnapshot
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.notes import Remark
from squall.protocol.snapshot_rounds import SILENT_S


class LastFiles:
    """Of the snapshot under way, in one life."""

    def __init__(self, rate: float) -> None:
        """`rate` is how fast the coordinator's clock runs."""
        self._patience_s = SILENT_S / rate
        self._number = 0
        self.asked_at = -math.inf
        self._heard: dict[Node, float] = {}  # when something of a shard's file has come last; infinity: all of it

    def watch(self, now: float, node: Node, what: Event | Effect) -> None:
        if node != COORDINATOR:
            return
        match what:
            case Transmit(to, frame, again=False) if isinstance(frame.message, TakeSnapshot):
                if frame.message.number > self._number:
                    self._number, self.asked_at, self._heard = frame.message.number, now, {}
                self._heard[to] = -math.inf
            case FrameArrived(sender, frame) if isinstance(frame.message, SnapshotTaken | SnapshotPiece):
                if frame.message.number == self._number:  # else it comes again, of one before; a link may hold it
                    self._hear(sender, math.inf if isinstance(frame.message, SnapshotTaken) else now)
            case PublishSnapshot() | Remark("error"):
                self._heard = {}
            case PeersHeard(nodes):
                for heard in nodes:
                    self._hear(heard, now)

    def _hear(self, node: Node, now: float) -> None:
        if node in self._heard:
            self._heard[node] = max(self._heard[node], now)

    @property
    def waited_for(self) -> float:
        """Until when who is in a hurry waits because of what has come, of every file that lacks."""
        return min(self._heard.values(), default=-math.inf) + self._patience_s
