"""Exchanges of replicas that lie on several machines: each part brings its own of a gradient, and gets its own weights.

Only the first part, which is the replica, says what is exchanged. What the others bring comes in parcels, and a push is
put together before the shard's machine sees it. What that answers with weights goes out in parcels as well, and to the
replica last: where a part is on the shard's machine, the places of all parts there are one, and the replica may move
its weights as soon as it has the answer.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from squall.protocol.effects import Effect, Forget, Payload, Send, UseWeights
from squall.protocol.events import Event, MessageArrived, Moved, PushAsked, Started
from squall.protocol.frames import Message
from squall.protocol.machine import Awaiting, Refusal
from squall.protocol.messages import Exchange, Parcel
from squall.protocol.nodes import Node, part_nodes, replica_node, shard_nodes, whole
from squall.protocol.nursery_messages import Placed
from squall.protocol.sandblaster.messages import PushPortions
from squall.protocol.shard_duties import ShardDuties


class Parcelled:
    """A shard, around its machine, in a run whose replicas may have `parts` that lie `apart` from the first."""

    def __init__(self, machine: ShardDuties, parts: int, apart: Iterable[Node]) -> None:
        self.machine = machine
        self._parts = parts
        # Of each replica that lies on several machines: the newest parcel of each of its other parts.
        self._brought: dict[Node, dict[Node, Parcel | None]] = {}
        self._held: dict[Node, Message] = {}  # its push, of which parcels are still to come
        for part in apart:
            self._admit(part)

    @property
    def node(self) -> Node:
        return self.machine.node

    @property
    def wake_at(self) -> float | None:
        return self.machine.wake_at

    @property
    def version(self) -> int:
        return self.machine.version

    @property
    def examples(self) -> int:
        return self.machine.examples

    @property
    def held(self) -> bool:
        return bool(self._held) or (isinstance(self.machine, Awaiting) and self.machine.held)

    def awaits(self) -> Node | None:
        """Whom the shard's machine waits for, or a replica of which a part has not brought its own."""
        if isinstance(self.machine, Awaiting) and self.machine.held:
            return self.machine.awaits()
        return next(iter(self._held))

    def on(self, event: Event, now: float) -> list[Effect]:
        match event:
            case MessageArrived(sender, Parcel() as parcel):
                return self._on_parcel(sender, parcel, now)
            case MessageArrived(sender, Exchange() | PushPortions() as push) if sender in self._brought:
                if self._lacks(sender, push):
                    if sender in self._held:
                        raise Refusal("it pushes again before its last push is answered")
                    self._held[sender] = push
                    return []
                self._pass_on(sender, push)
            case MessageArrived(_, Placed(node)) if node.role == "part":
                return [*self._drop_those_before(node), *self.machine.on(event, now)]
            case Moved():
                return [*self._drop_shown(), *self.machine.on(event, now)]
        return self._outgoing(self.machine.on(event, now))

    def brings(self, sender: Node, message: Message) -> Payload | None:
        """What one part has of a push."""
        if type(message) is Parcel:
            replica = whole(sender, self._parts)
            return self._parcel(replica, sender, message) if replica in self._brought else None
        found = self.machine.brings(sender, message)
        return replace(found, part=0) if found is not None and sender in self._brought else found

    def waiting(self) -> list[Payload]:
        """What parts have brought, and is not applied yet."""
        found = []
        for each in self.machine.waiting():
            parts = self._parts if each.owner in self._brought else 0
            found += [replace(each, part=part) for part in range(parts)] or [each]
        for replica, brought in self._brought.items():
            found += [self._parcel(replica, part, parcel) for part, parcel in brought.items() if parcel is not None]
        pushes = [self.brings(*held) for held in self._held.items()]
        return [*found, *(each for each in pushes if each is not None)]

    def _parcel(self, replica: Node, part: Node, parcel: Parcel) -> Payload:
        number = part.index % self._parts
        return Payload("gradient", replica, parcel.buffer, parcel.clock, self.node.index, part=number)

    def _drop_shown(self) -> list[Effect]:
        """Where this goes on their other parts do not call it: others take the places of all that a view has shown."""
        gone = [node for node in self._brought if node in self._shown]
        return [effect for node in gone for effect in (Forget(node), *self._drop(node))]

    def _drop(self, replica: Node) -> list[Effect]:
        self._held.pop(replica, None)
        return [Forget(part) for part in self._brought.pop(replica, ())]

    @property
    def _shown(self) -> set[Node]:
        return {replica_node(each.slot, each.incarnation) for each in self.machine.view.members}

    def _admit(self, part: Node) -> None:
        replica = whole(part, self._parts)
        self._brought.setdefault(replica, dict.fromkeys(part_nodes(replica, self._parts)))

    def _drop_those_before(self, part: Node) -> list[Effect]:
        """Of replicas in its slot that no view has shown, and none will."""
        self._admit(part)
        replica, shown = whole(part, self._parts), self._shown
        dropped = [
            node for node in self._brought if node.index == replica.index and node < replica and node not in shown
        ]
        return [forget for node in dropped for forget in self._drop(node)]

    def _on_parcel(self, part: Node, parcel: Parcel, now: float) -> list[Effect]:
        replica = whole(part, self._parts)
        brought = self._brought.get(replica)
        if brought is None or part not in brought:
            return []  # its replica is gone
        brought[part] = parcel
        push = self._held.get(replica)
        if push is None or self._lacks(replica, push):
            return []
        del self._held[replica]
        self._pass_on(replica, push)
        try:
            return self._outgoing(self.machine.on(MessageArrived(replica, push), now))
        except Refusal as refusal:
            raise Refusal(str(refusal), of=replica) from None

    def _lacks(self, replica: Node, push: Message) -> bool:
        """Whether a part has not brought its own of that yet."""
        parcel = _parcel_of(push)
        return parcel is not None and any(brought != parcel for brought in self._brought[replica].values())

    def _pass_on(self, replica: Node, push: Message) -> None:
        """What its parts have brought is the machine's now."""
        parcel, brought = _parcel_of(push), self._brought[replica]
        self._brought[replica] = {part: None if each == parcel else each for part, each in brought.items()}

    def _outgoing(self, effects: list[Effect]) -> list[Effect]:
        """The machine's effects, with the parcels that go along."""
        if not self._brought:
            return effects
        found: list[Effect] = []
        for effect in effects:
            match effect:
                case Send(to, message, Payload() as payload) if to in self._brought:
                    for number, part in enumerate(self._brought[to], start=1):
                        parcel = Parcel(payload.clock, payload.buffer)
                        found.append(Send(part, parcel, replace(payload, part=number)))
                    found.append(Send(to, message, replace(payload, part=0)))
                    continue
                case Forget(node):
                    found += self._drop(node)
            found.append(effect)
        return found


def _parcel_of(push: Message) -> Parcel | None:
    """What the other parts bring of it; None where that is nothing."""
    match push:
        case Exchange(clock, buffer, batches=batches) if buffer >= 0 and batches:
            return Parcel(clock, buffer)
        case PushPortions(_, buffer, _, clock):
            return Parcel(clock, buffer)
    return None


class PartMachine:
    """Of another part: it brings to the shards what the first part pushes, and takes weights into use when all came."""

    wake_at: float | None = None

    def __init__(self, node: Node, parts: int, shards: int, buffers: int) -> None:
        """`buffers`: of weights."""
        self.node = node
        self._replica, self._part = whole(node, parts), node.index % parts
        self._buffers = buffers
        # What has come of the fetch under way: the next one begins when all parts have taken this into use.
        self._came: dict[Node, Parcel | None] = dict.fromkeys(shard_nodes(shards))

    def on(self, event: Event, now: float) -> list[Effect]:
        match event:
            case PushAsked(clock, buffer):
                payload = Payload("gradient", self._replica, buffer, clock, 0, part=self._part)
                return [Send(to, Parcel(clock, buffer), replace(payload, shard=to.index)) for to in self._came]
            case MessageArrived(shard, Parcel() as parcel):
                return self._on_weights(shard, parcel)
            case Started():
                pass
            case _:
                raise AssertionError(f"{self.node} does not know {event!r}")
        return []

    def _on_weights(self, shard: Node, parcel: Parcel) -> list[Effect]:
        if parcel.buffer >= self._buffers or self._came[shard] is not None:
            raise Refusal(f"it sends weights for buffer {parcel.buffer}, and nothing was asked")
        if any(other not in (None, parcel) for other in self._came.values()):
            raise Refusal("it sends weights of another exchange than the other shards")
        self._came[shard] = parcel
        if None in self._came.values():
            return []
        self._came = dict.fromkeys(self._came)
        return [UseWeights(parcel.buffer)]
