"""Puts leases that were trained as a whole together where one follows on another: a few rows instead of millions.

A resume takes the record back to the moment when a snapshot was asked for, and leases that ended after it are deleted.
So leases of before and after that moment are not put together as long as the snapshot is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from squall.record.rows import SEVERAL, LeaseRow
from squall.record.writer import Record


class Folding:
    """Brings ended leases into a record. Positions run on from an epoch into the next, as `Lease` has it."""

    def __init__(self, record: Record, examples: int) -> None:
        self._record = record
        self._examples = examples  # in an epoch
        self._eras: dict[int, Pieces] = {0: Pieces()}  # snapshot -> what ended after it was asked for; 0: at first

    def add(self, lease: LeaseRow, alone: bool = False) -> None:
        """`alone`: it is put together with no other."""
        if alone or lease.trained_stop < lease.stop:  # what was given back is told as it was
            self._record.add(lease)
        else:
            self._put(list(self._eras.values())[-1], lease)

    def found(self, ranges: Sequence[tuple[int, int]]) -> None:
        """What was answered before the run went on; the first numbers of leases are theirs."""
        for number, (start, stop) in enumerate(ranges):
            self.add(LeaseRow(number, 0, start, stop, 0, 0, 0.0, 0.0, stop))

    def asked(self, number: int) -> None:
        """A snapshot is asked for."""
        self._eras[number] = Pieces()

    def published(self, numbers: Sequence[int]) -> None:
        """These snapshots are there: only to them a resume may still go back."""
        into = None
        for number, pieces in list(self._eras.items()):
            if into is not None and number not in numbers and number <= numbers[-1]:
                for lease in self._eras.pop(number).by_start.values():
                    self._put(into, lease)
            else:
                into = pieces

    def _put(self, pieces: Pieces, lease: LeaseRow) -> None:
        start = lease.epoch * self._examples + lease.start
        stop = lease.epoch * self._examples + lease.stop
        if start in pieces.by_start or stop in pieces.by_stop:  # trained twice: both are told
            self._record.add(lease)
            return
        if (before := pieces.by_stop.pop(start, None)) is not None:
            start = before.epoch * self._examples + before.start
            lease = self._joined(before, lease)
        if (behind := pieces.by_start.pop(stop, None)) is not None:
            stop = behind.epoch * self._examples + behind.stop
            lease = self._joined(lease, behind)
        pieces.by_start[start] = pieces.by_stop[stop] = lease
        self._record.add(lease)

    def _joined(self, first: LeaseRow, second: LeaseRow) -> LeaseRow:
        """One row for both. It has the first's number: either serves to find the row when the record goes back."""
        self._record.remove(second)
        one = (first.replica, first.incarnation) == (second.replica, second.incarnation)
        replica, incarnation = (first.replica, first.incarnation) if one else (SEVERAL, 0)
        stop = first.stop + second.stop - second.start
        return LeaseRow(
            first.lease, first.epoch, first.start, stop, replica, incarnation,
            min(first.granted_s, second.granted_s), max(first.ended_s, second.ended_s), stop,
        )  # fmt: skip


class Pieces:
    """Leases that ended between two snapshots' moments: disjoint ranges, none of which follows on another."""

    def __init__(self) -> None:
        self.by_start: dict[int, LeaseRow] = {}
        self.by_stop: dict[int, LeaseRow] = {}
