"""When another process starts in the place of one that died: at once, after longer and longer pauses, or never.

What counts is a death soon after the start, with nothing done. Who lives for a while, or finishes a batch, and is then
taken away may be replaced for ever: that is what cheap machines do. Who dies at once, time after time, has a reason
that another try does not remove.
"""

from __future__ import annotations

from squall.protocol.nodes import Node

LOST_IN_A_ROW = 5  # processes of a replica's slot that die soon: the slot is given up
SOON_S = 10.0  # after it has joined
PAUSES_S = (0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # by how many of a row have died; the last for all that follow


class Replacing:
    def __init__(self) -> None:
        self.given_up: dict[int, None] = {}  # slots of replicas
        self._joined: dict[Node, float] = {}  # when
        self._in_a_row: dict[tuple[str, int], int] = {}  # slot -> processes that died soon, one after the other
        self._due: dict[Node, float] = {}  # processes to be started -> when
        self._held: dict[Node, float] = {}  # the same, but something has to happen before

    @property
    def wake_at(self) -> float | None:
        return min(self._due.values(), default=None)

    def joined(self, node: Node, now: float) -> None:
        self._joined[node] = now

    def stood(self, node: Node, seconds: float) -> None:
        """It has hung for so long before it was killed: that is no time in which it lived."""
        if node in self._joined:
            self._joined[node] += seconds

    def fruitful(self, node: Node) -> None:
        """A process of this slot has done something that counts."""
        self._in_a_row.pop((node.role, node.index), None)

    def lost(self, node: Node, now: float, *, however_late: bool = False) -> int:
        """How many processes of its slot have died soon, in a row. `however_late`: this death counts in any case."""
        if now - self._joined.pop(node, now) >= SOON_S and not however_late:
            self.fruitful(node)
            return 0
        slot = node.role, node.index
        self._in_a_row[slot] = lost = self._in_a_row.get(slot, 0) + 1
        return lost

    def replace(self, node: Node, now: float, at_once: bool = False) -> Node:
        """Have its successor, which is returned, started when its time has come (`take_due`)."""
        lost = self._in_a_row.get((node.role, node.index), 0)
        pause_s = 0.0 if at_once else PAUSES_S[min(lost, len(PAUSES_S) - 1)]
        successor = Node(node.role, node.index, node.incarnation + 1)
        self._due[successor] = now + pause_s
        return successor

    def hold(self, node: Node) -> None:
        """Have it started in its time, but not before `let_go`."""
        self._held[node] = self._due.pop(node)

    def let_go(self, slot: int) -> None:
        """Of a replica."""
        for node in [node for node in self._held if node.index == slot]:
            self._due[node] = self._held.pop(node)

    def awaits(self, node: Node) -> bool:
        """It is not started yet."""
        return node in self._due or node in self._held

    def take_due(self, now: float) -> list[Node]:
        due = [node for node, at in self._due.items() if at <= now]
        for node in due:
            del self._due[node]
        return due

    def hasten(self, now: float) -> None:
        """Start those at once whose pause is not over."""
        self._due = dict.fromkeys(self._due, now)

    def cease(self) -> None:
        """Nobody is started any more."""
        self._due.clear()
        self._held.clear()
