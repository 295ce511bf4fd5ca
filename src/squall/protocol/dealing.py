"""Which replica gets which work next: the strategy's side of handing out leases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from squall.protocol.exchanges import Exchanges
from squall.protocol.leases import Leases
from squall.protocol.messages import Grant, Lease
from squall.protocol.nodes import Node

LEASE_BATCHES_AT_MOST = 16


class Dealer:
    """Hands out leases to so many replicas."""

    def __init__(self, replicas: int, exchanges: Exchanges, leases: Leases) -> None:
        self.leases = leases
        self._replicas = replicas
        self._push_every, self._dealing = exchanges.cadence.push_every, exchanges.dealing
        self.in_rounds, self._awaited = exchanges.in_rounds, exchanges.awaited
        self._lease_is_push = exchanges.droppable
        self.newest_clock = 0  # of the rounds that were dealt
        self._clocks: dict[Node, int] = {}  # replica -> clock of the round that it has work for
        self._rounds: dict[int, dict[Node, Lease]] = {}  # clock -> leases that were dealt and are not asked for yet
        self._step_s: dict[Node, float] = {}  # how long a replica's batches took lately

    @property
    def warming_up(self) -> bool:
        return self.leases.trained < self._dealing.warm_start

    def grant(self, node: Node, members: Mapping[Node, int], now: float) -> Grant | None:
        """A member's next work; None when it has to wait. `members` are replicas with their entry clocks."""
        if self.in_rounds:
            clock = self._clocks[node] = self._clocks.get(node, members[node]) + 1
            if clock > self.newest_clock:
                self.newest_clock = clock
                self._deal_round(clock, members, now)
            return Grant(self._rounds.get(clock, {}).pop(node, None))
        lease = None
        if not self.warming_up or node == min(members):
            lease = self.leases.take(node, self._lease_batches(), now)
        if lease is None and not self._awaited:
            return None
        return Grant(lease, self._steps(node, members))

    def forget(self, node: Node) -> None:
        """The replica is not a member any more."""
        self._clocks.pop(node, None)
        self._step_s.pop(node, None)

    def paced(self, node: Node, step_s: float) -> None:
        """A replica says how long its batches took."""
        if step_s > 0:
            self._step_s[node] = step_s

    def _steps(self, node: Node, members: Iterable[Node]) -> int:
        """Batches of a push in proportion to speed; the fastest does `push_every` (Liu et al. 2024, section 4)."""
        own = self._step_s.get(node)
        if not self._dealing.matched or own is None:
            return 0
        fastest = min(self._step_s.get(member, own) for member in members)
        return max(1, round(self._push_every * fastest / own))

    def _deal_round(self, clock: int, members: Iterable[Node], now: float) -> None:
        """One push's worth of batches for each member; dealt when the first member asks.

        What a slow member has not asked for is kept for as long as it lives, however far the others have come.
        """
        live = sorted(members)
        known = frozenset(live)
        for old in [c for c, dealt in self._rounds.items() if not any(node in known for node in dealt)]:
            del self._rounds[old]
        dealt = self._rounds[clock] = {}
        epoch = None
        for node in live[: 1 if self.warming_up else None]:
            lease = self.leases.take(node, self._push_every, now, within_epoch=epoch)
            if lease is None:
                break
            epoch = lease.epoch
            dealt[node] = lease

    def _lease_batches(self) -> int:
        """Long enough that asking costs little, and shorter towards the end, so that all end an epoch together."""
        push_every = self._push_every
        if self._lease_is_push:
            return push_every
        size = max(1, min(self.leases.left_in_epoch() // self._replicas, LEASE_BATCHES_AT_MOST))
        if push_every > LEASE_BATCHES_AT_MOST:
            return size
        return max(push_every, size - size % push_every)
