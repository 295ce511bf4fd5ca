"""The shard's machine: apply each push once, answer each fetch when its bound allows, and know who is alive.

The rules that tell the algorithms apart live here:

- *gather*: "each" push is an update of its own, or the pushes of one clock make one update together, once every
  live replica has pushed for it ("mean").
  A round may also close when *enough* have pushed for it (all but the `backup` slowest, or a `quorum`), at once or
  after a grace that others may still use: a share of the time that the last round took. What comes later is dropped,
  or folded into the next round.
- *max delay* tau: a fetch by a replica at clock c is answered when every live replica has pushed clock c - tau
  or later (Ho et al. 2013; Li et al. 2014, section 3.4). With "each" this bounds the staleness of a push by
  (replicas - 1) * (2 tau + 1), and by (replicas - 1) * 2 * (tau + 1) + 1 with overlap, where the replica's own last
  push is one. A replica that was replaced during the computation counts twice.
"""

from __future__ import annotations

from squall.protocol.clocks import Clocks
from squall.protocol.effects import Apply, Effect, Forget, Payload, Send, Term
from squall.protocol.events import CopyMade, Event, MessageArrived, NumbersTorn, TimePassed
from squall.protocol.exchanges import Exchanges, mean_factors
from squall.protocol.machine import Refusal
from squall.protocol.messages import Cover, Departed, Exchange, Exchanged, Member, View, ViewSeen
from squall.protocol.nodes import COORDINATOR, Node, replica_node
from squall.protocol.pushed_work import covered
from squall.protocol.shard_duties import ShardDuties
from squall.protocol.unsaved import Unsaved

LEASES_KEPT = 64  # of each replica; with `reports.REPORT_LEASES` unreported ones, the coordinator knows of all others


class _Replica:
    """What a shard knows of a live replica."""

    __slots__ = ("asked", "clock", "covers", "node", "staleness")

    def __init__(self, node: Node, entry: int) -> None:
        self.node = node
        self.clock = entry  # of its last push, counted on from the entry
        self.asked = False  # for an answer that it does not have yet
        self.staleness = -1  # of a push that is not answered yet; -1: there is none
        self.covers: tuple[Cover, ...] = ()  # what is applied of its leases, the oldest first

    def cover(self, covers: tuple[Cover, ...]) -> None:
        """Note what a push has brought: the newest `LEASES_KEPT` leases are remembered."""
        self.covers = covered(self.covers, covers)[-LEASES_KEPT - len(covers) :]


class Shard(ShardDuties):
    def __init__(
        self, index: int, exchanges: Exchanges, version: int = 0, examples: int = 0, copied: bool = False
    ) -> None:  # fmt: skip
        """`copied`: its host makes copies of its numbers, and it can go back to them."""
        super().__init__(index, version, examples)
        self._unsaved = Unsaved(copied)
        self.rules = exchanges.rules
        self._covers_at_most = exchanges.cadence.push_every  # in a push: each batch may be of another lease
        self._newest = 0  # the highest clock of a replica
        self._replicas: dict[Node, _Replica] = {}  # the newest view, in slot order
        self._rounds: dict[int, dict[Node, Exchange]] = {}  # clock -> pushes not applied yet ("mean")
        self._closed = 0  # clock of the newest round that was applied
        self._closed_at: float | None = None
        self._last_took = 0.0  # seconds from the end of the round before the last to the end of the last
        self.wake_at: float | None = None  # when the grace of the open round ends
        self._clocks = Clocks()  # of the replicas
        self._waiting: dict[int, dict[Node, Exchange]] = {}  # clock -> fetches held back by the bound
        # What was applied of the replicas that departed with the newest view. Of those that departed earlier every
        # ledger knows, because a view is shown only when all shards have seen the one before.
        self._gone: list[Cover] = []

    def on(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if type(event) is MessageArrived and type(event.message) is Exchange:  # most are
            self._on_exchange(event.sender, event.message, now, effects)
        elif type(event) is TimePassed:
            self._settle(now, effects)
        elif type(event) is CopyMade:
            self._unsaved.kept(event, effects)
        elif type(event) is NumbersTorn:
            self.examples -= self._unsaved.lost(event, effects)
        else:
            self._on_duty(event, now, effects)
        return effects

    @property
    def held(self) -> bool:
        """Replicas have no answer yet."""
        return bool(self._rounds or self._waiting)

    def awaits(self) -> Node | None:
        """The slowest replica; where some are spare, and several are behind, nobody knows which it will be."""
        behind = sorted(self._replicas.values(), key=lambda replica: replica.clock)
        spare = self._rounds and not self.rules.waits_for_all and behind[1:] and behind[1].clock < min(self._rounds)
        return None if spare else behind[0].node

    # ------------------------------------------------------------ exchanges

    def _on_exchange(self, sender: Node, exchange: Exchange, now: float, effects: list[Effect]) -> None:
        replica = self._replicas.get(sender)
        if replica is None:
            if sender.role != "replica":  # one that is not in the newest view is gone: its slot may be another's by now
                self._show(sender, exchange, effects)
            return
        if replica.asked:
            raise Refusal("it exchanges, and has no answer to its last exchange")
        if exchange.gradient < 0:
            replica.asked = True
            self._fetch(replica, exchange, now, effects)
            return
        if exchange.clock != replica.clock + 1 or exchange.basis > self.version:
            at = f"at clock {replica.clock} and version {self.version}"
            raise Refusal(f"it pushes for clock {exchange.clock} on version {exchange.basis}, {at}")
        if len(exchange.covers) > self._covers_at_most:
            raise Refusal(f"it pushes batches of {len(exchange.covers)} leases, and {self._covers_at_most} at most")
        replica.asked = True
        if self.rules.gather == "mean":
            self._gather(replica, exchange, now, effects)
        else:
            self._move(replica, exchange.clock)
            self._apply_each(replica, exchange, effects)
            self._answer_when_due(replica, exchange, effects)
            if self._waiting:
                self._release(effects)

    def _fetch(self, replica: _Replica, exchange: Exchange, now: float, effects: list[Effect]) -> None:
        """Weights alone: a newcomer's first, or for a batch that is tried again.

        A newcomer begins where the others are, also when another shard knows them to be further, by one exchange at
        most. It waits for those that it is ahead of, like any other: what it computes on may lack no more of their
        pushes than the bound allows.
        """
        clock = min(exchange.clock, self._newest + 1)
        if clock > replica.clock:
            self._move(replica, clock)
        self._answer_when_due(replica, exchange, effects)
        self._settle(now, effects)

    def _settle(self, now: float, effects: list[Effect]) -> None:
        """Do what may be due when a replica's clock has moved, or the members have changed."""
        self._close_rounds(now, effects)
        self._release(effects)

    def _move(self, replica: _Replica, clock: int) -> None:
        self._clocks.move(replica.clock, clock)
        replica.clock = clock
        if clock > self._newest:
            self._newest = clock

    def _apply_each(self, replica: _Replica, exchange: Exchange, effects: list[Effect]) -> None:
        if exchange.examples or exchange.batches:  # a further step on a batch has no examples of its own
            staleness = replica.staleness = self.version - exchange.basis
            term = Term(replica.node, exchange.gradient, 1.0, exchange.clock)
            rate = self.rules.rate_of_push(staleness)
            effects.append(Apply((term,), 1 / len(self._replicas), exchange.clock, rate, exchange.factors))
            self.version += 1
            self.examples += exchange.examples
        self._note(replica, exchange)

    def _note(self, replica: _Replica, exchange: Exchange) -> None:
        """It is applied."""
        replica.cover(exchange.covers)
        self._unsaved.add(self.version, exchange.examples, exchange.covers)

    def _answer_when_due(self, replica: _Replica, exchange: Exchange, effects: list[Effect]) -> None:
        """At once where no bound can hold it; what waits is answered by `_release`."""
        if exchange.weights < 0 or (self.rules.gather == "each" and self.rules.max_delay is None):
            self._answer(replica, exchange, effects)
        else:
            self._waiting.setdefault(replica.clock, {})[replica.node] = exchange

    def _release(self, effects: list[Effect]) -> None:
        """Answer the fetches that the bound now allows, the oldest clocks first, then in slot order."""
        if not self._waiting:
            return
        ahead = 0 if self.rules.gather == "mean" else self.rules.max_delay or 0
        reached = max(self._clocks.slowest() + ahead, self._closed)
        for clock in sorted(self._waiting):
            if clock > reached:
                return
            for node, exchange in sorted(self._waiting.pop(clock).items()):
                self._answer(self._replicas[node], exchange, effects)

    def _gather(self, replica: _Replica, exchange: Exchange, now: float, effects: list[Effect]) -> None:
        """Put a push into its round; one that comes after its round goes into the next, or nowhere."""
        late = exchange.clock <= self._closed
        if late and self.rules.late == "drop" and exchange.examples:
            self._move(replica, self._closed)
            self._answer(replica, exchange, effects, dropped=True)
            return
        self._move(replica, self._closed + 1 if late else exchange.clock)
        self._rounds.setdefault(replica.clock, {})[replica.node] = exchange
        self._settle(now, effects)

    def _close_rounds(self, now: float, effects: list[Effect]) -> None:
        """Apply every round that is complete, oldest first."""
        self.wake_at = None
        for clock in sorted(self._rounds):
            if not self._complete(clock, now):
                return
            self._closed = clock
            if self._closed_at is not None:
                self._last_took = now - self._closed_at
            self._closed_at = now
            self._apply_round(clock, self._rounds.pop(clock), effects)

    def _complete(self, clock: int, now: float) -> bool:
        """Every live replica has pushed; or enough have, and the grace is over. Pushes of nothing do not count."""
        if self._clocks.slowest() >= clock:
            return True
        rules, pushes = self.rules, self._rounds[clock]
        if rules.waits_for_all:
            return False
        enough = rules.quorum or max(1, len(self._replicas) - rules.backup)
        if self._clocks.beyond(clock) + sum(exchange.examples > 0 for exchange in pushes.values()) < enough:
            return False
        began = self._closed_at if self._closed_at is not None else now
        self.wake_at = began + self._last_took * (1 + rules.grace)
        return rules.grace == 0 or now >= self.wake_at

    def _apply_round(self, clock: int, pushes: dict[Node, Exchange], effects: list[Effect]) -> None:
        ordered = [(node, pushes[node]) for node in self._replicas if node in pushes]  # sums in slot order
        examples = sum(exchange.examples for _, exchange in ordered)
        stale = self.version
        if examples:
            terms = tuple(
                Term(node, exchange.gradient, exchange.examples / examples, exchange.clock)
                for node, exchange in ordered
                if exchange.examples
            )
            filled = [exchange for _, exchange in ordered if exchange.examples]
            effects.append(Apply(terms, 1.0, clock, self.rules.rate_of_round(filled), mean_factors(filled)))
            self.version += 1
            self.examples += examples
        for node, exchange in ordered:
            replica = self._replicas[node]
            replica.staleness = stale - exchange.basis if exchange.examples else -1
            self._note(replica, exchange)
            self._answer(replica, exchange, effects)

    def _answer(self, replica: _Replica, exchange: Exchange, effects: list[Effect], dropped: bool = False) -> None:
        node = replica.node
        answer = Exchanged(replica.clock, self.version, replica.staleness, dropped, self.examples)
        payload = None
        if exchange.weights >= 0:
            payload = Payload("weights", node, exchange.weights, exchange.clock, self.node.index, self.version)
        effects.append(Send(node, answer, payload))
        replica.staleness, replica.asked = -1, False

    def waiting(self) -> list[Payload]:
        pushes = (each for exchanges in self._rounds.values() for each in exchanges.items())
        return [Payload("gradient", node, each.gradient, each.clock, self.node.index) for node, each in pushes]

    # ------------------------------------------------------------ members

    def _progress(self) -> tuple[Cover, ...]:
        known = [self._gone, *(replica.covers for replica in self._replicas.values())]
        return tuple(cover for covers in known for cover in covers)

    def _on_view(self, view: View, now: float, effects: list[Effect]) -> None:
        self._gone = []
        before, self._replicas = self._replicas, {}
        slowest = min((before[node].clock for node in map(_node, view.members) if node in before), default=0)
        slowest = max(slowest, self._closed)
        for member in view.members:
            node = _node(member)  # a newcomer neither holds the others nor runs ahead of them
            known = before.pop(node) if node in before else None
            self._replicas[node] = known or _Replica(node, max(member.entry, slowest))
            self._newest = max(self._newest, member.entry)
        self._clocks = Clocks(replica.clock for replica in self._replicas.values())
        departed = []
        for node, replica in before.items():
            applied = {cover.lease: cover.upto for cover in replica.covers}
            departed.append(Departed(node.index, node.incarnation, applied))
            self._gone += replica.covers
            self._drop(node)
            effects.append(Forget(node))
        effects.append(Send(COORDINATOR, ViewSeen(view.number, tuple(departed))))
        self._settle(now, effects)

    def _drop(self, node: Node) -> None:
        """Forget what a departed replica has pushed or asked for: another replica will have its slot."""
        for held in (self._waiting, self._rounds):
            for clock in [clock for clock, exchanges in held.items() if node in exchanges]:
                del held[clock][node]
                if not held[clock]:
                    del held[clock]


def _node(member: Member) -> Node:
    return replica_node(member.slot, member.incarnation)
