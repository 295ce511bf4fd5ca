"""Batches that scripts leave out: leases count their examples as trained, and the record must not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from squall.record.rows import LeaseRow, SkipRow


class LeftOut:
    """`examples` counts those that were left out; it begins with those of earlier processes of the run."""

    def __init__(self, examples: int = 0) -> None:
        self.examples = examples
        self._of: dict[int, list[SkipRow]] = defaultdict(list)  # leases that have not ended

    def known(self, skips: Iterable[SkipRow]) -> None:
        """Take up what was left out by earlier processes, of leases that had not ended."""
        for skip in skips:
            self._of[skip.lease].append(skip)

    def add(self, skip: SkipRow) -> None:
        self.known([skip])
        self.examples += skip.stop - skip.start

    def within(self, lease: int, start: int, stop: int) -> int:
        """Examples that were left out of this part of a lease, which consists of whole batches."""
        return sum(skip.stop - skip.start for skip in self._of.get(lease, ()) if start <= skip.start < stop)

    def ended(self, lease: LeaseRow) -> bool:
        """Whether something was left out of it. What it was not trained beyond is dealt again, and not counted here."""
        self.examples -= self.within(lease.lease, lease.trained_stop, lease.stop)
        return bool(self._of.pop(lease.lease, ()))
