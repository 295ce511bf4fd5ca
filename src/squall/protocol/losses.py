"""What of its leases a shard may still lose, by a death inside an update, and what it has lost.

A shard that dies so goes back to a copy of its numbers (`protocol.succession`). What it had applied since is dealt
again, also of leases that have ended meanwhile. So the ledger remembers those until every shard has told
(`Kept`) that what counts as trained of them is in a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from squall.protocol.ledger import Range, gaps
from squall.protocol.messages import Cover, Lease
from squall.protocol.notes import LeaseEnded


class Known(Protocol):
    """A lease that is held, or has ended."""

    @property
    def lease(self) -> Lease: ...

    @property
    def done(self) -> int:
        """Examples before this were told as trained."""


class Losses:
    def __init__(self, shards: int) -> None:
        """`shards` that go back to copies."""
        self._shards = shards
        self._ended: dict[int, LeaseEnded] = {}  # by lease: some shard may have no copy of what counts of it
        self._kept: dict[int, dict[int, int]] = {}  # lease -> shard -> upto, as its copy has it
        self._lost: dict[int, list[tuple[int, int]]] = {}  # lease -> examples that some shard has lost

    def ended(self, lease: LeaseEnded) -> None:
        self._ended[lease.lease.id] = lease
        self._forget_safe(lease.lease.id)

    def kept(self, shard: int, covers: Iterable[Cover], held: Mapping[int, Known]) -> None:
        """The shard has a copy with all of this."""
        for cover in covers:
            if cover.lease in held or cover.lease in self._ended:
                self._kept.setdefault(cover.lease, {})[shard] = cover.upto
                self._forget_safe(cover.lease)

    def lose(
        self, shard: int, covers: Iterable[Cover], held: Mapping[int, Known]
    ) -> tuple[list[Range], list[Range]]:  # fmt: skip
        """The shard has lost what it had applied of these since its copy.

        Returns what was told as trained, and is dealt again at once, and what is when it is told. What others have lost
        before is in neither, nor what came back when its lease ended.
        """
        at_once: list[Range] = []
        later: list[Range] = []
        for cover in covers:
            known = held.get(cover.lease) or self._ended.get(cover.lease)
            if known is not None:
                for first, last in self._new(shard, known.lease, cover.upto):
                    told = max(first, min(known.done, last))
                    at_once += _range(known.lease, first, told)
                    later += _range(known.lease, told, last) if cover.lease in held else ()
        return at_once, later

    def within(self, lease: Lease, start: int, stop: int) -> list[Range]:
        """What of these examples of the lease is lost."""
        lost = sorted(self._lost.get(lease.id, ()))
        return [part for first, last in lost for part in _range(lease, max(start, first), min(stop, last))]

    def _new(self, shard: int, lease: Lease, upto: int) -> list[tuple[int, int]]:
        start = max(lease.start, self._kept.get(lease.id, {}).get(shard, lease.start))
        lost, stop = self._lost.setdefault(lease.id, []), min(upto, lease.stop)
        new = gaps([(first, min(last, stop)) for first, last in lost if first < stop], stop, start)
        lost += new
        return new

    def _forget_safe(self, lease: int) -> None:
        """Nobody can lose what counts of a lease that has ended."""
        if (ended := self._ended.get(lease)) is None:
            return
        safe = sum(upto >= ended.done for upto in self._kept.get(lease, {}).values())
        if safe == self._shards or ended.done == ended.lease.start:
            for of_leases in (self._ended, self._kept, self._lost):
                of_leases.pop(lease, None)


def _range(lease: Lease, start: int, stop: int) -> list[Range]:
    return [Range(lease.epoch, start, stop)] if start < stop else []
