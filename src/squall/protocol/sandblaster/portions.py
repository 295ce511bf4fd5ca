"""One evaluation's portions: who computes which, and which are counted. Each is counted exactly once."""

from __future__ import annotations

import math
from collections import deque

import msgspec

from squall.protocol.ledger import Range
from squall.protocol.messages import Stats
from squall.protocol.nodes import Node

HOLDERS_AT_MOST = 2  # replicas that compute the same portion
PATIENCE = 1.5  # times as long as a portion usually takes: then it is backed up


class Balance(msgspec.Struct, frozen=True):
    """How work is balanced."""

    size: int  # examples of a portion
    push_every: int = 4  # portions
    backup: bool = True  # idle replicas also compute the portions that are out for longest


class _Out:
    """A portion that somebody computes."""

    __slots__ = ("holders", "since")

    def __init__(self, since: float) -> None:
        self.holders: list[Node] = []
        self.since = since


class Portions:
    """The ledger of one evaluation of a batch."""

    def __init__(self, batch: Range, balance: Balance, took_s: deque[float]) -> None:
        self.batch = batch
        self.balance = balance
        self.ranges = [
            Range(batch.epoch, start, min(start + balance.size, batch.stop))
            for start in range(batch.start, batch.stop, balance.size)
        ]
        self._took_s = took_s  # how long portions took lately, over evaluations
        self._took_last: dict[Node, float] = {}
        self._fresh = list(reversed(range(len(self.ranges))))
        self._out: dict[int, _Out] = {}
        self._kept: dict[int, Node] = {}  # counted, and still with the replica that computed it
        self._counted: dict[int, tuple[Node, float]] = {}  # who computed it, and its mean loss
        self._applied: dict[int, None] = {}  # in every shard's sum

    @property
    def examples(self) -> int:
        return self.batch.stop - self.batch.start

    @property
    def complete(self) -> bool:
        return len(self._applied) == len(self.ranges)

    @property
    def loss(self) -> float:
        """Mean over the batch; the same whoever computed what."""
        return math.fsum(self.share(portion) * loss for portion, (_, loss) in sorted(self._counted.items()))

    def work(self) -> list[tuple[Node, Stats]]:
        """Who has trained what of it."""
        stats: dict[Node, Stats] = {}
        for portion, (node, loss) in sorted(self._counted.items()):
            size = self.ranges[portion].stop - self.ranges[portion].start
            so_far = stats.get(node, Stats())
            stats[node] = Stats(so_far.examples + size, so_far.batches + 1, so_far.loss_sum + size * loss)
        return sorted(stats.items())

    def may_be_last(self, node: Node) -> bool:
        """The batch may be over before the replica has computed another: it should not sit on what it has."""
        left_s = len(self._fresh) * self._usual_s / max(1, len(self._out))
        return left_s <= 2 * self._took_last.get(node, self._usual_s)

    @property
    def _usual_s(self) -> float:
        return sorted(self._took_s)[len(self._took_s) // 2] if self._took_s else 0.0

    def share(self, portion: int) -> float:
        range_ = self.ranges[portion]
        return (range_.stop - range_.start) / self.examples

    def give(self, node: Node, now: float) -> int | None:
        """The next portion for an idle replica: a fresh one, else the one that is out for longest, if that is long."""
        if self._fresh:
            portion = self._fresh.pop()
            self._out[portion] = _Out(now)
        else:
            late = self._late(node)
            if late is None or now < self.late_at(node):
                return None
            portion = late
        self._out[portion].holders.append(node)
        return portion

    def late_at(self, node: Node) -> float:
        """When this replica may compute what another one is late with; infinite if there is no such portion."""
        late = self._late(node)
        return math.inf if late is None else self._out[late].since + PATIENCE * self._usual_s

    def _late(self, node: Node) -> int | None:
        if not self.balance.backup:
            return None
        waiting = [p for p, out in self._out.items() if node not in out.holders and len(out.holders) < HOLDERS_AT_MOST]
        return min(waiting, key=lambda p: (self._out[p].since, p), default=None)

    def done(self, node: Node, portion: int, loss: float, now: float) -> bool:
        """The replica has computed it; True if it is the first, and its gradient counts."""
        if portion not in self._out:
            return False
        self._took_last[node] = now - self._out.pop(portion).since
        self._took_s.append(self._took_last[node])
        self._kept[portion] = node
        self._counted[portion] = node, loss
        return True

    def is_kept(self, portion: int) -> bool:
        """It is counted, and a shard may have it."""
        return portion in self._kept

    def applied(self, portions: tuple[int, ...]) -> None:
        """All shards have these."""
        for portion in portions:
            if self._kept.pop(portion, None) is not None:
                self._applied[portion] = None

    def lose(self, node: Node) -> None:
        """The replica is gone: what it computed, or kept, is fresh again unless a backup is at it."""
        for portion, out in list(self._out.items()):
            if node in out.holders:
                out.holders.remove(node)
                if not out.holders:
                    del self._out[portion]
                    self._fresh.append(portion)
        for portion, holder in list(self._kept.items()):
            if holder == node:
                del self._kept[portion], self._counted[portion]
                self._fresh.append(portion)
        self._fresh.sort(reverse=True)
