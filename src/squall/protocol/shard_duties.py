"""What a shard does beside its work: it keeps to the newest view, saves snapshots, and lets the evaluator look."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from squall.protocol.copied import CopyTo
from squall.protocol.copy_messages import KeepCopy
from squall.protocol.effects import Admit, Effect, End, Forget, Payload, PayloadKind, Send, WriteSnapshot
from squall.protocol.events import Event, MessageArrived, Moved, SnapshotWritten, Started, TimePassed
from squall.protocol.frames import Message
from squall.protocol.loss_messages import SnapshotLost
from squall.protocol.machine import Refusal
from squall.protocol.messages import (
    PIECE_BYTES,
    Cover,
    Exchange,
    Exchanged,
    PieceKept,
    SnapshotPiece,
    SnapshotTaken,
    Stop,
    TakeSnapshot,
    View,
)
from squall.protocol.nodes import COORDINATOR, Node, replica_node
from squall.protocol.nursery_messages import Placed
from squall.protocol.sandblaster.messages import PushPortions


class Travelling:
    """A file of a snapshot on its way to the coordinator's machine, one piece at a time."""

    def __init__(self, taken: SnapshotTaken, size: int) -> None:
        self.taken = taken  # what is said when all of it is there
        self._size = 0 if taken.error else size  # bytes
        self._start = 0  # of the next piece

    def next_piece(self) -> SnapshotPiece | None:
        if self._start >= self._size:
            return None
        return SnapshotPiece(self.taken.number, self._start, min(PIECE_BYTES, self._size - self._start), self._size)

    def kept(self, error: str) -> None:
        """A piece has arrived, or the whole file is lost."""
        self._start += PIECE_BYTES
        if error:
            self.taken = msgspec.structs.replace(self.taken, error=error)
            self._size = 0

    def send_next(self, node: Node, effects: list[Effect]) -> bool:
        """The next piece of the node's file; behind the last one, that the snapshot is taken. False: that was all."""
        piece = self.next_piece()
        if piece is None:
            effects.append(Send(COORDINATOR, self.taken))
            return False
        count, number = piece.start // PIECE_BYTES, piece.number
        effects.append(Send(COORDINATOR, piece, Payload("piece", node, piece.size, count, node.index, number)))
        return True


class ShardDuties(ABC):
    """Of every shard, whatever its numbers are for."""

    wake_at: float | None = None

    def __init__(self, index: int, version: int, examples: int) -> None:
        self.node = Node("shard", index)
        self.version = version  # updates applied, or steps accepted
        self.examples = examples  # behind them
        self.view = View(0, ())
        self._evaluator = 0  # the highest incarnation of an evaluator that has asked for weights
        self._snapshots: dict[int, SnapshotTaken] = {}  # being written, as they were when that began
        self._travelling: Travelling | None = None

    @abstractmethod
    def on(self, event: Event, now: float) -> list[Effect]: ...

    @abstractmethod
    def _on_view(self, view: View, now: float, effects: list[Effect]) -> None:
        """A newer view: forget who is gone, and tell the coordinator what was applied of their work."""

    @abstractmethod
    def _progress(self) -> tuple[Cover, ...]:
        """What a snapshot of now would have of the live leases."""

    @abstractmethod
    def waiting(self) -> Sequence[Payload]:
        """What was pushed, and is not applied yet."""

    def brings(self, sender: Node, message: Message) -> Payload | None:
        """The numbers of a push."""
        match message:
            case Exchange(clock=clock, gradient=buffer) | PushPortions(clock=clock, buffer=buffer) if buffer >= 0:
                return Payload("gradient", sender, buffer, clock, self.node.index)
        return None

    def _on_duty(self, event: Event, now: float, effects: list[Effect]) -> None:
        match event:
            case MessageArrived(_, View() as view):
                if view.number > self.view.number:
                    self.view = view
                    self._on_view(view, now, effects)
            case MessageArrived(_, TakeSnapshot(number)):
                taken = SnapshotTaken(number, self.version, self._progress(), examples=self.examples)
                self._snapshots = {number: taken}  # one before it, that is not answered, was given up
                effects.append(WriteSnapshot(number, self.version))
            case SnapshotWritten(number, error, checksum, size) if number in self._snapshots:
                taken = msgspec.structs.replace(self._snapshots.pop(number), error=error, checksum=checksum)
                self._travelling = Travelling(taken, size)
                self._send_piece(effects)
            case MessageArrived(_, PieceKept(number, error)):
                if self._travelling is not None and number == self._travelling.taken.number:
                    self._travelling.kept(error)
                    self._send_piece(effects)
            case MessageArrived(_, Placed(node, machine)):
                effects.append(Admit(node, machine))
            case MessageArrived(_, KeepCopy(backup, machine, beside)):
                effects.append(CopyTo(backup, machine, beside))
            case MessageArrived(_, Stop()):
                # Who has not left is not waited for: of a run that has failed, replicas may be gone already.
                effects.extend(Forget(replica_node(each.slot, each.incarnation)) for each in self.view.members)
                effects.append(End("finished"))
            case Started():  # in the place of another one, whose files nobody else has
                over = [] if self._travelling is None else [self._travelling.taken.number]
                effects += [Send(COORDINATOR, SnapshotLost(number)) for number in (*self._snapshots, *over)]
                self._snapshots, self._travelling = {}, None
            case TimePassed() | SnapshotWritten() | Moved():
                pass
            case _:
                raise AssertionError(f"{self.node} does not know {event!r}")

    def _send_piece(self, effects: list[Effect]) -> None:
        """Send the next piece of the file on its way; behind the last one, that the snapshot is taken."""
        assert self._travelling is not None
        if not self._travelling.send_next(self.node, effects):
            self._travelling = None

    def _show(self, evaluator: Node, asked: Exchange, effects: list[Effect]) -> None:
        """Answer an evaluator with the weights. Those before it are dead.

        What they asked for and comes late would be written over weights that are being evaluated.
        """
        for older in range(self._evaluator, evaluator.incarnation):
            effects.append(Forget(Node("evaluator", evaluator.index, older)))
        self._evaluator = max(self._evaluator, evaluator.incarnation)
        self._send_weights("weights", evaluator, asked, effects)

    def _send_weights(self, kind: PayloadKind, to: Node, asked: Exchange, effects: list[Effect]) -> None:
        if asked.weights < 0:
            raise Refusal("it fetches weights, and names no buffer for them")
        payload = Payload(kind, to, asked.weights, asked.clock, self.node.index, self.version)
        effects.append(Send(to, Exchanged(asked.clock, self.version, examples=self.examples), payload))
