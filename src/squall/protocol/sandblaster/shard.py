"""Sandblaster's shard: vectors by name, combined and multiplied as the coordinator says."""

from __future__ import annotations

from collections.abc import Sequence

from squall.protocol.effects import AddPortions, CalculateVectors, Effect, Forget, Payload, Send
from squall.protocol.events import Event, MessageArrived, Started, VectorsCalculated
from squall.protocol.machine import Refusal
from squall.protocol.messages import Cover, Departed, Exchange, View, ViewSeen
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.sandblaster.messages import Calculated, Calculation, PortionsTaken, PushPortions
from squall.protocol.shard_duties import ShardDuties


class BatchShard(ShardDuties):
    def __init__(self, index: int, version: int = 0, examples: int = 0) -> None:
        super().__init__(index, version, examples)
        self.evaluation = 0  # whose portions are taken
        self._portions = 0  # that it has
        self._taken: dict[Node, dict[int, int]] = {}  # live replica -> portion -> evaluation, in the sum
        self._added = 0  # pushes, into the sums of all evaluations
        self._asked: dict[int, Calculation] = {}  # that the host has not answered, by number

    def on(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case MessageArrived(_, Calculation() as calculation):
                self._on_calculation(calculation, effects)
            case MessageArrived(sender, PushPortions() as push):
                self._on_push(sender, push, effects)
            case MessageArrived(sender, Exchange() as asked):
                if sender.role == "evaluator":
                    self._show(sender, asked, effects)
                elif sender in self._taken:  # else it is not in the newest view: its slot may be another's by now
                    self._send_weights("trial", sender, asked, effects)
            case VectorsCalculated(number, values):
                del self._asked[number]
                effects.append(Send(COORDINATOR, Calculated(number, values)))
            case Started():
                effects += map(CalculateVectors, self._asked.values())
                self._on_duty(event, now, effects)
            case _:
                self._on_duty(event, now, effects)
        return effects

    def _on_calculation(self, message: Calculation, effects: list[Effect]) -> None:
        if message.opens is not None:
            self.evaluation, self._portions = message.opens, message.portions
            for taken in self._taken.values():
                taken.clear()
        if any(combine.target == "weights" for combine in message.combine):
            self.version += 1
            self.examples = message.examples
        self._asked[message.number] = message
        effects.append(CalculateVectors(message))

    def _on_push(self, sender: Node, push: PushPortions, effects: list[Effect]) -> None:
        taken = self._taken.get(sender)
        if taken is None:
            return
        answer = PortionsTaken(push.evaluation, push.portions)
        if push.evaluation == self.evaluation:
            for portion in push.portions:
                if portion >= self._portions or portion in taken:
                    raise Refusal(f"it pushes portion {portion} of {self._portions}, or pushes it again")
            self._added += 1
            effects.append(AddPortions(sender, push.buffer, push.clock, self._added))
            taken.update(dict.fromkeys(push.portions, push.evaluation))
            # To the coordinator as well: the replica may be busy with a portion for long.
            effects.append(Send(COORDINATOR, answer))
        effects.append(Send(sender, answer))

    def waiting(self) -> Sequence[Payload]:
        return ()  # each is added as it comes

    def _progress(self) -> tuple[Cover, ...]:
        return ()  # there are no leases

    def _on_view(self, view: View, now: float, effects: list[Effect]) -> None:
        before, self._taken = self._taken, {}
        for member in view.members:
            node = Node("replica", member.slot, member.incarnation)
            self._taken[node] = before.pop(node, {})
        departed = []
        for node, taken in before.items():
            departed.append(Departed(node.index, node.incarnation, taken))
            effects.append(Forget(node))
        effects.append(Send(COORDINATOR, ViewSeen(view.number, tuple(departed))))
