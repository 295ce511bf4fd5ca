"""Where in its data a run is, as a published snapshot says."""

from __future__ import annotations

from squall.protocol.effects import PublishSnapshot
from squall.protocol.leases import Leases, Limits
from squall.sim.proof.memory import Batch


def restored(manifest: PublishSnapshot, batch_size: int, limits: Limits) -> Leases:
    """The data position that a run goes on from."""
    progress = [(int(lease), upto) for lease, upto in manifest.progress.items()]
    return Leases.restore(dict(manifest.ledger), progress, batch_size, limits)


def trained(left: Leases, size: int) -> set[Batch]:
    """Batches that were dealt, and are not dealt again."""

    def batches(epoch: int, start: int, stop: int) -> list[Batch]:
        return [(epoch, at, min(at + size, left.examples)) for at in range(start, stop, size)]

    dealt = [batch for epoch in range(left.epoch) for batch in batches(epoch, 0, left.examples)]
    again = {batch for span in left.returned for batch in batches(*span)}
    return {*dealt, *batches(left.epoch, 0, left.cursor)} - again
