"""What the coordinator knows of the backups of shards: which are there, and which can take over."""

from __future__ import annotations

from dataclasses import dataclass

from squall.protocol.copy_messages import CopyJoined, KeepCopy
from squall.protocol.effects import Effect, Send
from squall.protocol.nodes import Node
from squall.protocol.notes import MemberJoined, Remark
from squall.protocol.nursery_messages import Placed
from squall.protocol.placing import Placing
from squall.protocol.policy import Policy


@dataclass
class _Backup:
    node: Node
    pid: int
    address: str  # where its shard is called if it takes over
    whole: bool = False


class Copies:
    def __init__(self, policy: Policy, placing: Placing) -> None:
        self._placing, self._several = placing, bool(policy.rooms)
        self._there: dict[Node, _Backup] = {}  # by shard
        self._warned = False
        self._moved: dict[Node, Placed] = {}

    @property
    def unready(self) -> list[Node]:
        """Backups that do not know when their shard ends."""
        return [backup.node for backup in self._there.values() if not backup.whole]

    def joined(self, node: Node, message: CopyJoined, effects: list[Effect]) -> None:
        """Its shard makes it whole."""
        shard, machine = Node("shard", node.index), self._placing.on[node]
        if machine == self._placing.on.get(shard) and not self._warned:
            self._warned = True
            text = "shards and their backups are on one machine, since there is no other: its loss is not survived"
            effects.append(Remark("warning", text))
        self._there[shard] = _Backup(node, message.pid, message.address)
        beside = [each for each in self._placing.there(machine) if each.role == "replica"] if self._several else []
        effects += [*self.told(node), Send(shard, KeepCopy(node, machine, tuple(beside)))]

    def kept(self, node: Node, effects: list[Effect]) -> None:
        """It can take over from now on, unless another one is in its place."""
        backup = self._there.get(Node("shard", node.index))
        if backup is not None and backup.node == node:
            backup.whole = True
            effects.append(MemberJoined(node, backup.pid, self._placing.on[node], ()))

    def lost(self, node: Node, effects: list[Effect]) -> None:
        """The shard waits for it no longer, and may say what it does not have."""
        shard = Node("shard", node.index)
        backup = self._there.get(shard)
        if backup is not None and backup.node == node:
            del self._there[shard]
            effects.append(Send(shard, KeepCopy(None)))

    def beside(self, machine: int) -> list[Node]:
        """Backups on the machine of their own shard, though another one would be better."""
        there = self._placing.there(machine)
        return [node for node in there if node.role == "backup" and Node("shard", node.index) in there]

    def can_take_over(self, shard: Node, without: int | None = None) -> bool:
        """`without`: a machine that is lost."""
        backup = self._there.get(shard)
        return backup is not None and backup.whole and self._placing.on.get(backup.node) not in (None, without)

    def half(self, shard: Node) -> Node | None:
        """Its backup, if that is there and cannot take over."""
        backup = self._there.get(shard)
        return backup.node if backup is not None and not backup.whole else None

    def take_over(self, shard: Node) -> tuple[Node, Placed]:
        """Its backup, which is none any more, and where the shard is from now on."""
        backup = self._there.pop(shard)
        placed = self._moved[shard] = Placed(shard, self._placing.on[backup.node], backup.address)
        self._placing.vacate(backup.node)
        self._placing.on[shard] = placed.machine
        return backup.node, placed

    @property
    def moved(self) -> tuple[Placed, ...]:
        """Shards that are not where they began."""
        return tuple(self._moved.values())

    def has_moved(self, shard: Node) -> bool:
        return shard in self._moved

    def told(self, node: Node) -> list[Effect]:
        """Where shards are called, to a process that has just come."""
        return [Send(node, placed) for placed in self.moved] if self._several else []
