"""The shard's machine: apply each push once, answer each fetch when its bound allows, and know who is alive.

The two rules that tell the algorithms apart live here:

- *gather*: "each" push is an update of its own, or the pushes of one clock make one update together, once every
  live replica has pushed for it ("mean").
- *max delay* tau: a fetch by a replica at clock c is answered when every live replica has pushed clock c - tau
  or later (Ho et al. 2013; Li et al. 2014, section 3.4). With "each" this bounds the staleness of a push by
  (replicas - 1) * (2 tau + 1), and by (replicas - 1) * 2 * (tau + 1) + 1 with overlap, where the replica's own last
  push is one. A replica that was replaced during the computation counts twice.
"""

from __future__ import annotations

import msgspec

from squall.protocol.core import (
    COORDINATOR,
    Apply,
    Effect,
    End,
    Event,
    Forget,
    MessageArrived,
    Node,
    Payload,
    Send,
    SnapshotWritten,
    Started,
    Term,
    TimePassed,
    WriteSnapshot,
)
from squall.protocol.messages import (
    Cover,
    Departed,
    Exchange,
    Exchanged,
    Member,
    Message,
    SnapshotTaken,
    Stop,
    TakeSnapshot,
    View,
    ViewSeen,
)

LEASES_KEPT = 64  # of each replica; with `replica.REPORT_LEASES` unreported ones, the coordinator knows of all others


class Rules(msgspec.Struct, frozen=True):
    """What of a strategy a shard must know."""

    gather: str = "each"  # "each" | "mean"
    max_delay: int | None = None  # exchanges; None: no bound


class _Replica:
    """What a shard knows of a live replica."""

    __slots__ = ("clock", "covers", "node")

    def __init__(self, node: Node, entry: int) -> None:
        self.node = node
        self.clock = entry  # of its last push, counted on from the entry
        self.covers: dict[int, int] = {}  # lease -> upto, applied


class Shard:
    def __init__(self, index: int, rules: Rules, version: int = 0) -> None:
        self.node = Node("shard", index)
        self.rules = rules
        self.version = version  # updates applied
        self.view = View(0, ())
        self._replicas: dict[Node, _Replica] = {}  # the newest view, in slot order
        self._rounds: dict[int, dict[Node, Exchange]] = {}  # clock -> pushes not applied yet ("mean")
        self._waiting: dict[Node, Exchange] = {}  # fetches held back by the bound
        self._staleness: dict[Node, int] = {}  # of pushes whose answer is held back
        self._snapshots: dict[int, SnapshotTaken] = {}  # being written, as they were when that began

    @property
    def wake_at(self) -> float | None:
        return None

    def on(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case MessageArrived(sender, message):
                self._on_message(sender, message, effects)
            case SnapshotWritten(number, error):
                taken = self._snapshots.pop(number)
                effects.append(Send(COORDINATOR, SnapshotTaken(number, taken.version, taken.progress, error)))
            case Started() | TimePassed():
                pass
            case _:
                raise AssertionError(f"{self.node} does not know {event!r}")
        return effects

    def _on_message(self, sender: Node, message: Message, effects: list[Effect]) -> None:
        match message:
            case Exchange():
                self._on_exchange(sender, message, effects)
            case View():
                self._on_view(message, effects)
            case TakeSnapshot(number):
                progress = tuple(Cover(*item) for replica in self._replicas.values() for item in replica.covers.items())
                self._snapshots[number] = SnapshotTaken(number, self.version, progress)
                effects.append(WriteSnapshot(number, self.version))
            case Stop():
                effects.append(End("finished"))
            case _:
                raise AssertionError(f"{self.node} does not know {message!r}")

    # ------------------------------------------------------------ exchanges

    def _on_exchange(self, sender: Node, exchange: Exchange, effects: list[Effect]) -> None:
        replica = self._replicas.get(sender)
        if replica is None:
            if sender.role == "replica":
                return  # not in the newest view: it is gone, and its slot may be another's by now
            self._answer(sender, exchange, effects)  # an evaluator only looks
            return
        if exchange.gradient < 0:
            self._answer(sender, exchange, effects)
            return
        assert exchange.clock > replica.clock, f"{sender} pushed clock {exchange.clock} after {replica.clock}"
        replica.clock = exchange.clock
        if self.rules.gather == "mean":
            self._rounds.setdefault(exchange.clock, {})[sender] = exchange
            self._close_rounds(effects)
        else:
            self._apply_each(replica, exchange, effects)
            if exchange.weights < 0:
                self._answer(sender, exchange, effects)
            else:
                self._waiting[sender] = exchange
            self._release(effects)

    def _apply_each(self, replica: _Replica, exchange: Exchange, effects: list[Effect]) -> None:
        self._staleness[replica.node] = self.version - exchange.basis
        if exchange.examples:
            term = Term(replica.node.index, exchange.gradient, 1.0)
            effects.append(Apply((term,), 1 / len(self._replicas)))
            self.version += 1
        else:
            self._staleness[replica.node] = -1
        self._cover(replica, exchange)

    def _release(self, effects: list[Effect]) -> None:
        """Answer the fetches that the bound now allows, in slot order."""
        bound = self.rules.max_delay
        slowest = min((replica.clock for replica in self._replicas.values()), default=0)
        for node in list(self._replicas):
            exchange = self._waiting.get(node)
            if exchange is not None and (bound is None or exchange.clock - bound <= slowest):
                del self._waiting[node]
                self._answer(node, exchange, effects)

    def _close_rounds(self, effects: list[Effect]) -> None:
        """Apply every round that all its live members have pushed, oldest first."""
        for clock in sorted(self._rounds):
            if any(replica.clock < clock for replica in self._replicas.values()):
                return
            self._apply_round(self._rounds.pop(clock), effects)

    def _apply_round(self, pushes: dict[Node, Exchange], effects: list[Effect]) -> None:
        ordered = [(node, pushes[node]) for node in self._replicas if node in pushes]  # sums in slot order
        examples = sum(exchange.examples for _, exchange in ordered)
        stale = self.version
        if examples:
            terms = tuple(
                Term(node.index, exchange.gradient, exchange.examples / examples)
                for node, exchange in ordered
                if exchange.examples
            )
            effects.append(Apply(terms, 1.0))
            self.version += 1
        for node, exchange in ordered:
            self._staleness[node] = stale - exchange.basis if exchange.examples else -1
            self._cover(self._replicas[node], exchange)
            self._answer(node, exchange, effects)

    def _cover(self, replica: _Replica, exchange: Exchange) -> None:
        for lease, upto in _pairs(exchange.covers):
            replica.covers[lease] = upto
        while len(replica.covers) > LEASES_KEPT:
            del replica.covers[next(iter(replica.covers))]

    def _answer(self, node: Node, exchange: Exchange, effects: list[Effect]) -> None:
        payload = Payload("weights", node.index, exchange.weights) if exchange.weights >= 0 else None
        staleness = self._staleness.pop(node, -1)
        known = self._replicas.get(node)
        clock = known.clock if known is not None else exchange.clock
        effects.append(Send(node, Exchanged(clock, self.version, staleness), payload))

    # ------------------------------------------------------------ members

    def _on_view(self, view: View, effects: list[Effect]) -> None:
        if view.number <= self.view.number:
            return
        self.view = view
        before, self._replicas = self._replicas, {}
        slowest = min((before[node].clock for node in map(_node, view.members) if node in before), default=0)
        for member in view.members:
            node = _node(member)  # a newcomer neither holds the others nor runs ahead of them
            known = before.pop(node) if node in before else None
            self._replicas[node] = known or _Replica(node, max(member.entry, slowest))
        departed = []
        for node, replica in before.items():
            departed.append(
                Departed(node.index, node.incarnation, tuple(Cover(*item) for item in replica.covers.items()))
            )
            self._drop(node)
            effects.append(Forget(node))
        effects.append(Send(COORDINATOR, ViewSeen(view.number, tuple(departed))))
        self._close_rounds(effects)
        self._release(effects)

    def _drop(self, node: Node) -> None:
        """Nothing of this replica is applied any more: its slot will be another's."""
        self._waiting.pop(node, None)
        self._staleness.pop(node, None)
        for clock in list(self._rounds):
            self._rounds[clock].pop(node, None)
            if not self._rounds[clock]:
                del self._rounds[clock]


def _node(member: Member) -> Node:
    return Node("replica", member.slot, member.incarnation)


def _pairs(covers: tuple[Cover, ...]) -> list[tuple[int, int]]:
    return [(cover.lease, cover.upto) for cover in covers]
