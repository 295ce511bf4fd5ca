"""The leases of a snapshot: those that were held when it was asked for, and those that were granted while it was taken.

Each shard tells with its file which leases are in it, and remembers few. The ledger is that of the asking.
"""

from __future__ import annotations

from collections.abc import Mapping

from squall.protocol.losses import Losses
from squall.protocol.messages import Lease
from squall.protocol.nodes import Node


class Held:
    """A lease that a replica has, or had."""

    __slots__ = ("done", "granted_s", "holder", "lease")

    def __init__(self, lease: Lease, holder: Node, now: float) -> None:
        self.lease, self.holder, self.granted_s = lease, holder, now
        self.done = lease.start  # examples before this are applied by all shards

    def state(self, done: int) -> list[int]:
        """As a ledger has it."""
        return [self.lease.epoch, self.lease.start, done, self.lease.stop, self.holder.index]


class Since:
    def __init__(self, held: Mapping[int, Held]) -> None:
        """Those that are held as the ledger is taken."""
        self._in_ledger = frozenset(held)
        self._leases = dict(held)

    def grant(self, held: Held) -> None:
        self._leases[held.lease.id] = held

    def filled(self, covers: Mapping[int, int], losses: Losses) -> dict[int, int]:
        """What a shard's file has (lease -> upto), of which the shard remembers `covers`, the newest of each holder.

        A holder pushes in order. So the file has what is told as trained of its earlier leases. What a shard has lost
        of them meanwhile is trained again, also where it is in the file.
        """
        newest: dict[Node, int] = {}
        for lease in self._leases.keys() & covers.keys():
            holder = self._leases[lease].holder
            newest[holder] = max(lease, newest.get(holder, lease))
        forgotten = {
            lease: held.done
            for lease, held in self._leases.items()
            if lease not in covers and lease < newest.get(held.holder, 0) and held.done > held.lease.start
            if not losses.within(held.lease, held.lease.start, held.done)
        }
        return {**forgotten, **covers}

    def granted(self, progress: Mapping[int, int]) -> dict[str, list[int]]:
        """Those that are not in the ledger, and are in the files; nothing of them was trained then."""
        leases = ((lease, self._leases[lease]) for lease in sorted(self._leases.keys() & progress.keys()))
        return {str(lease): held.state(held.lease.start) for lease, held in leases if lease not in self._in_ledger}
