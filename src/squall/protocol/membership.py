"""Who is alive, who is coming and who is going.

A replica is *joining* from its Join until every shard has seen a view with it (only then may it push), *live* until
it leaves or is lost, and *departing* until every shard has seen a view without it (only then is its share of the
data dealt again and its slot reused: what the shards applied of it is known exactly, and nothing more can come).
Without shards the live replicas themselves have to see the views, where they work together at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from squall.protocol.machine import Refusal
from squall.protocol.messages import Member, View, ViewSeen
from squall.protocol.nodes import Node, shard_nodes

Applied = dict[int, int]  # lease -> upto; for Sandblaster portion -> evaluation


class Membership:
    def __init__(self, shards: int, observed: bool = True) -> None:
        """`observed`: somebody has to see views; else one is seen as soon as it is made."""
        self.shards = shards
        self._observed = observed
        self.number = 0  # of the newest view
        self.live: dict[Node, int] = {}  # replica -> entry clock; joining ones included
        self._slots: set[int] = set()  # in use, or not free yet
        self._changed = False  # since the newest view
        self._joining: dict[Node, int] = {}  # replica -> view that must be seen before it may push
        self._departing: dict[Node, int] = {}  # replica -> view that must be seen before its slot is free
        self._seen = dict.fromkeys(shard_nodes(shards), 0)  # newest view that each has seen who has to
        self._applied: dict[Node, list[Applied]] = {}  # departing -> what each shard applied of its leases

    def join(self, node: Node, entry: int) -> None:
        """Its slot must be free."""
        self.live[node] = entry
        self._slots.add(node.index)
        self._joining[node] = self.number + 1
        self._changed = True
        if not self.shards and self._observed:
            self._seen[node] = self.number  # earlier views are not shown to it

    def depart(self, node: Node) -> bool:
        """A live replica left or was lost; False if nobody knows it as a member."""
        if self.live.pop(node, None) is None:
            return False
        if self._joining.pop(node, 0) > self.number:  # no view has named it
            self._slots.discard(node.index)
            self._seen.pop(node, None)
            return False
        self._applied[node] = []
        self._departing[node] = self.number + 1
        self._changed = True
        self._seen.pop(node, None)
        return True

    def renew(self) -> None:
        """Have the next view shown, though nobody has come or gone."""
        self._changed = True

    def next_view(self) -> View | None:
        """What the shards are to be told now: nothing, before they have seen the last view; then all that changed.

        So a thousand replicas that come or go at once are a few views, and not a thousand of a thousand members.
        """
        if not self._changed or self.reached < self.number:
            return None
        self._changed = False
        self.number += 1
        members = sorted(self.live.items())
        return View(self.number, tuple(Member(n.index, n.incarnation, entry) for n, entry in members))

    def check_seen(self, observer: Node, message: ViewSeen) -> None:
        """Raises `Refusal` for what is not the answer to the newest view, which everybody gives once."""
        awaited = self._seen[observer] < message.number == self.number
        if not awaited or any(self._departing.get(node) != self.number for node in _departed(message)):
            raise Refusal(f"it has seen another view {message.number} than the newest, which is {self.number}")

    def seen(self, observer: Node, message: ViewSeen) -> None:
        """Raises `Refusal` as `check_seen` does."""
        self.check_seen(observer, message)
        self._seen[observer] = message.number
        for node, applied in _departed(message).items():
            self._applied[node].append(applied)

    def has_seen(self, observer: Node) -> bool:
        """The newest view."""
        return self._seen[observer] >= self.number

    @property
    def reached(self) -> int:
        """The newest view that all have seen who have to."""
        return min(self._seen.values(), default=self.number)

    @property
    def settled(self) -> bool:
        """All who have to know who is live."""
        return not self._changed and self.reached >= self.number

    def slot_free(self, slot: int) -> bool:
        """No shard can still apply something of an earlier incarnation in this slot."""
        return slot not in self._slots

    def take_joined(self) -> list[tuple[Node, int]]:
        """Replicas that may push from now on, with their entry clocks."""
        return [(node, self.live[node]) for node in _take_reached(self._joining, self.reached)]

    def take_departed(self) -> list[tuple[Node, list[Applied]]]:
        """Replicas of which nothing more can come, with what each shard has applied of their work."""
        ready = _take_reached(self._departing, self.reached)
        self._slots.difference_update(node.index for node in ready)
        return [(node, self._applied.pop(node)) for node in ready]


def _departed(message: ViewSeen) -> dict[Node, Applied]:
    return {Node("replica", gone.slot, gone.incarnation): gone.applied for gone in message.departed}


def _take_reached(pending: dict[Node, int], seen: int) -> list[Node]:
    reached = [node for node, number in pending.items() if number <= seen]
    for node in reached:
        del pending[node]
    return reached


def common(applied: Sequence[Applied], shards: int) -> Applied:
    """What every shard has: a batch that only some shards applied must be trained again."""
    if not applied or len(applied) < shards:
        return {}
    leases = [lease for lease in applied[0] if all(lease in covers for covers in applied)]
    return {lease: min(covers[lease] for covers in applied) for lease in leases}
