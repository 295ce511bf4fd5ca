"""The rows of a run's record: what its audit, and that of a run that goes on from a snapshot, finds of the leases."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from squall.protocol.effects import PublishSnapshot
from squall.protocol.ledger import Ledger, Range


class Rows:
    """They survive a kill of all processes, and go back to its snapshot with the run, as `runtime.recorder` does it."""

    def __init__(self) -> None:
        self._told: dict[int, Range] = {}  # lease -> what was trained of it
        self._saved: dict[int, Range] = {}  # those of the newest snapshot

    def begin(self) -> None:
        """A life."""
        self._told = dict(self._saved)

    def add(self, lease: int, trained: Range) -> None:
        self._told[lease] = trained

    def published(self, manifest: PublishSnapshot) -> Iterable[Range]:
        """What a run that goes on from it finds: what was told until now, and of leases that it knows what it says."""
        ledger = msgspec.convert(manifest.ledger, Ledger)
        ended = {lease for lease in self._told if lease < ledger.next_id and str(lease) not in ledger.held}
        self._saved = {lease: self._told[lease] for lease in ended}
        for name, (epoch, start, done, _, _) in ledger.leases.items():
            self._saved[int(name)] = Range(epoch, start, max(done, manifest.progress.get(name, done)))
        return self._saved.values()
