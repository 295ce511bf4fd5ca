"""Where in its data a run is, as a published snapshot says it, and as the rows of the record do."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from squall.protocol.effects import PublishSnapshot
from squall.protocol.leases import Leases, Limits
from squall.protocol.ledger import Ledger, Range
from squall.sim.proof.memory import BatchRange


def restored(manifest: PublishSnapshot, batch_size: int, limits: Limits) -> Leases:
    """The data position that a run goes on from."""
    progress = [(int(lease), upto) for lease, upto in manifest.progress.items()]
    return Leases.restore(dict(manifest.ledger), progress, batch_size, limits)


def batches(epoch: int, start: int, stop: int, size: int) -> list[BatchRange]:
    """The batches of a range of examples."""
    return [(epoch, at, min(at + size, stop)) for at in range(start, stop, size)]


def trained(left: Leases, size: int) -> set[BatchRange]:
    """Batches that were dealt, and are not dealt again."""
    dealt = [batch for epoch in range(left.epoch) for batch in batches(epoch, 0, left.examples, size)]
    again = {batch for span in left.returned for batch in batches(*span, size)}
    return {*dealt, *batches(left.epoch, 0, left.cursor, size)} - again


class LeaseRows:
    """The record's rows of leases: what its audit finds of them, and that of a run that goes on from a snapshot.

    They survive a kill of all processes, and go back to its snapshot with the run, as `runtime.recorder` does it.
    """

    def __init__(self) -> None:
        self._told: dict[int, Range] = {}  # lease -> what was trained of it
        self._saved: dict[int, Range] = {}  # those of the newest snapshot

    def begin(self) -> None:
        """A life of the run begins, from the newest snapshot."""
        self._told = dict(self._saved)

    def add(self, lease: int, trained: Range) -> None:
        self._told[lease] = trained

    def published(self, manifest: PublishSnapshot) -> Iterable[Range]:
        """What the record says to a run that goes on from it: rows, and of leases under way what the snapshot says."""
        ledger = msgspec.convert(manifest.ledger, Ledger)
        ended = {lease for lease in self._told if lease < ledger.next_id and str(lease) not in ledger.held}
        self._saved = {lease: self._told[lease] for lease in ended}
        for name, (epoch, start, done, _, _) in ledger.leases.items():
            self._saved[int(name)] = Range(epoch, start, max(done, manifest.progress.get(name, done)))
        return self._saved.values()
