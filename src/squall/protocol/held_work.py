"""The work that a replica has in hand: leases that were granted, and the one that batches are cut from."""

from __future__ import annotations

import msgspec

from squall.protocol.effects import Expect
from squall.protocol.messages import Grant, Lease, LeaseRequest


class Batch(msgspec.Struct, frozen=True, gc=False):
    """The part of a lease that one gradient is computed on."""

    lease: int
    epoch: int
    start: int
    stop: int


class HeldWork:
    """Hands out the batches of granted leases, and asks for the next grant in time."""

    __slots__ = ("_grants", "_lease", "_next", "_spent_s", "_steps", "asked", "batch_size", "idle", "starved")

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.asked = False  # for the next grant
        self.idle = False  # the current round has no batch for this replica
        self.starved = False  # there is no work for now; the next grant will come by itself
        self._lease: Lease | None = None  # the lease that batches are cut from
        self._next = 0  # where in the lease the next batch starts
        self._grants: list[Grant] = []  # rounds granted ahead
        self._steps, self._spent_s = 0, 0.0  # batches since the last request, and how long they took

    def take(self, grant: Grant, awaited: bool) -> list[Expect]:
        """Returns its batches. `awaited`: others wait for this replica's exchanges, so a grant of none counts, too."""
        lease = grant.lease
        self.starved = lease is None and not awaited
        if not self.starved:
            self.asked = False
            self._grants.append(grant)
        if lease is None:
            return []
        starts = range(lease.start, lease.stop, self.batch_size)
        return [Expect(lease.epoch, start, min(start + self.batch_size, lease.stop)) for start in starts]

    def ready(self, round_open: bool) -> bool:
        """There is a batch. In an open round no other grant is begun: the next is for the next round."""
        while self._lease is None and self._grants and not self.idle and not round_open:
            lease = self._grants.pop(0).lease
            if lease is None:
                self.idle = True
            else:
                self._lease, self._next = lease, lease.start
        return self._lease is not None

    @property
    def begun(self) -> bool:
        """There is more of the lease that the last batch is of."""
        return self._lease is not None

    @property
    def empty(self) -> bool:
        """There is no work until something is granted."""
        return self._lease is None and not self._grants

    def request(self) -> LeaseRequest | None:
        """Ask for the next grant when no more than a batch is left in hand."""
        last = self._lease is None or self._lease.stop - self._next <= self.batch_size
        if not last or self._grants or self.asked:
            return None
        self.asked = True
        step_s = self._spent_s / self._steps if self._steps else 0.0
        self._steps, self._spent_s = 0, 0.0
        return LeaseRequest(step_s)

    def spent(self, seconds: float) -> None:
        """A batch took so long, from when it was asked for until its gradient was there."""
        self._steps += 1
        self._spent_s += seconds

    def cut(self) -> Batch:
        lease, start = self._lease, self._next
        assert lease is not None
        self._next = stop = min(start + self.batch_size, lease.stop)
        if stop == lease.stop:
            self._lease = None
        return Batch(lease.id, lease.epoch, start, stop)

    def drop(self, leases: list[int]) -> None:
        """Forget these leases: they were given to others."""
        if self._lease is not None and self._lease.id in leases:
            self._lease = None
