"""What a shard does beside its work: it keeps to the newest view, saves snapshots, and lets the evaluator look."""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from squall.protocol.effects import Effect, End, Forget, Payload, Send, WriteSnapshot
from squall.protocol.events import Event, MessageArrived, SnapshotWritten, Started, TimePassed
from squall.protocol.messages import Cover, Exchange, Exchanged, SnapshotTaken, Stop, TakeSnapshot, View
from squall.protocol.nodes import COORDINATOR, Node


class ShardDuties(ABC):
    """Of every shard, whatever its numbers are for."""

    def __init__(self, index: int, version: int, examples: int) -> None:
        self.node = Node("shard", index)
        self.version = version  # updates applied, or steps accepted
        self.examples = examples  # behind them
        self.view = View(0, ())
        self._evaluator = 0  # the highest incarnation of an evaluator that has asked for weights
        self._snapshots: dict[int, SnapshotTaken] = {}  # being written, as they were when that began

    @abstractmethod
    def _on_view(self, view: View, now: float, effects: list[Effect]) -> None:
        """A newer view: forget who is gone, and tell the coordinator what was applied of their work."""

    @abstractmethod
    def _progress(self) -> tuple[Cover, ...]:
        """What a snapshot of now would have of the live leases."""

    def _on_duty(self, event: Event, now: float, effects: list[Effect]) -> None:
        match event:
            case MessageArrived(_, View() as view):
                if view.number > self.view.number:
                    self.view = view
                    self._on_view(view, now, effects)
            case MessageArrived(_, TakeSnapshot(number)):
                self._snapshots[number] = SnapshotTaken(number, self.version, self._progress(), examples=self.examples)
                effects.append(WriteSnapshot(number, self.version))
            case SnapshotWritten(number, error, checksum):
                taken = msgspec.structs.replace(self._snapshots.pop(number), error=error, checksum=checksum)
                effects.append(Send(COORDINATOR, taken))
            case MessageArrived(_, Stop()):
                effects.append(End("finished"))
            case Started() | TimePassed():
                pass
            case _:
                raise AssertionError(f"{self.node} does not know {event!r}")

    def _show(self, evaluator: Node, asked: Exchange, effects: list[Effect]) -> None:
        """Answer an evaluator with the weights. Those before it are dead.

        What they asked for and comes late would be written over weights that are being evaluated.
        """
        for older in range(self._evaluator, evaluator.incarnation):
            effects.append(Forget(Node("evaluator", evaluator.index, older)))
        self._evaluator = max(self._evaluator, evaluator.incarnation)
        self._send_weights("weights", evaluator, asked, effects)

    def _send_weights(self, kind: str, to: Node, asked: Exchange, effects: list[Effect]) -> None:
        payload = Payload(kind, to, asked.weights, asked.clock, self.node.index, self.version)
        effects.append(Send(to, Exchanged(asked.clock, self.version, examples=self.examples), payload))
