"""Sandblaster's shard: vectors by name, combined and multiplied as the coordinator says."""

from __future__ import annotations

import msgspec

from squall.protocol.effects import AddPortions, CalculateVectors, Effect, End, Forget, Payload, Send, WriteSnapshot
from squall.protocol.evaluator import predecessors
from squall.protocol.events import Event, MessageArrived, SnapshotWritten, Started, TimePassed, VectorsCalculated
from squall.protocol.frames import Message
from squall.protocol.messages import (
    Departed,
    Exchange,
    Exchanged,
    SnapshotTaken,
    Stop,
    TakeSnapshot,
    View,
    ViewSeen,
)
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.sandblaster.messages import Calculated, Calculation, PortionsTaken, PushPortions


class BatchShard:
    wake_at: float | None = None

    def __init__(self, index: int, version: int = 0, examples: int = 0) -> None:
        self.node = Node("shard", index)
        self.version = version  # steps accepted
        self.examples = examples  # evaluated until then
        self.evaluation = 0  # whose portions are taken
        self.view = View(0, ())
        self._evaluator = 0  # the highest incarnation of an evaluator that has asked for weights
        self._taken: dict[Node, dict[int, int]] = {}  # live replica -> portion -> evaluation, in the sum
        self._snapshots: dict[int, SnapshotTaken] = {}  # being written, as they were when that began

    def on(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case MessageArrived(sender, message):
                self._on_message(sender, message, effects)
            case VectorsCalculated(number, values):
                effects.append(Send(COORDINATOR, Calculated(number, values)))
            case SnapshotWritten(number, error, checksum):
                taken = msgspec.structs.replace(self._snapshots.pop(number), error=error, checksum=checksum)
                effects.append(Send(COORDINATOR, taken))
            case Started() | TimePassed():
                pass
            case _:
                raise AssertionError(f"{self.node} does not know {event!r}")
        return effects

    def _on_message(self, sender: Node, message: Message, effects: list[Effect]) -> None:
        match message:
            case Calculation():
                self._on_calculation(message, effects)
            case PushPortions():
                self._on_push(sender, message, effects)
            case Exchange(clock):
                if sender.role == "replica" and sender not in self._taken:
                    return  # not in the newest view: its slot may be another's by now
                if sender.role == "evaluator":
                    effects.extend(predecessors(sender, self._evaluator))
                    self._evaluator = max(self._evaluator, sender.incarnation)
                kind = "trial" if sender.role == "replica" else "weights"
                payload = Payload(kind, sender, message.weights, clock, self.node.index, self.version)
                effects.append(Send(sender, Exchanged(clock, self.version, examples=self.examples), payload))
            case View():
                self._on_view(message, effects)
            case TakeSnapshot(number):
                self._snapshots[number] = SnapshotTaken(number, self.version, (), examples=self.examples)
                effects.append(WriteSnapshot(number, self.version))
            case Stop():
                effects.append(End("finished"))
            case _:
                raise AssertionError(f"{self.node} does not know {message!r}")

    def _on_calculation(self, message: Calculation, effects: list[Effect]) -> None:
        if message.opens is not None:
            self.evaluation = message.opens
            for taken in self._taken.values():
                taken.clear()
        if any(combine.target == "weights" for combine in message.combine):
            self.version += 1
            self.examples = message.examples
        effects.append(CalculateVectors(message))

    def _on_push(self, sender: Node, push: PushPortions, effects: list[Effect]) -> None:
        taken = self._taken.get(sender)
        if taken is None:
            return
        answer = PortionsTaken(push.evaluation, push.portions)
        if push.evaluation == self.evaluation:
            effects.append(AddPortions(sender, push.buffer, push.clock))
            taken.update(dict.fromkeys(push.portions, push.evaluation))
            # To the coordinator as well: the replica may be busy with a portion for long.
            effects.append(Send(COORDINATOR, answer))
        effects.append(Send(sender, answer))

    def _on_view(self, view: View, effects: list[Effect]) -> None:
        if view.number <= self.view.number:
            return
        self.view = view
        before, self._taken = self._taken, {}
        for member in view.members:
            node = Node("replica", member.slot, member.incarnation)
            self._taken[node] = before.pop(node, {})
        departed = []
        for node, taken in before.items():
            departed.append(Departed(node.index, node.incarnation, taken))
            effects.append(Forget(node))
        effects.append(Send(COORDINATOR, ViewSeen(view.number, tuple(departed))))
