"""What scripts leave out, as far as the coordinator's host must know it: a count of trained examples lacks it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from squall.record.rows import LeaseRow, SkipRow


class LeftOut:
    """`examples`: left out of what is trained around them, or is to be; those of earlier processes to begin with."""

    def __init__(self, examples: int = 0) -> None:
        self.examples = examples
        self._of: dict[int, list[SkipRow]] = defaultdict(list)  # leases that have not ended

    def known(self, skips: Iterable[SkipRow]) -> None:
        """By earlier processes, of leases that had not ended."""
        for skip in skips:
            self._of[skip.lease].append(skip)

    def add(self, skip: SkipRow) -> None:
        self.known([skip])
        self.examples += skip.stop - skip.start

    def within(self, lease: int, start: int, stop: int) -> int:
        """Examples that were left out of this part of a lease, which consists of whole batches."""
        return sum(skip.stop - skip.start for skip in self._of.get(lease, ()) if start <= skip.start < stop)

    def ended(self, lease: LeaseRow) -> bool:
        """Whether something was left out of it. What it was not trained beyond is dealt again, and counts no more."""
        self.examples -= self.within(lease.lease, lease.trained_stop, lease.stop)
        return bool(self._of.pop(lease.lease, ()))
