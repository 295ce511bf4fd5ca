"""What of a strategy the loop's machines know: when replicas exchange, what shards make of it, how work is dealt."""

from __future__ import annotations

import msgspec

from squall.protocol.rules import Rules


class Cadence(msgspec.Struct, frozen=True):
    """When a replica exchanges, and what moves its weights in between."""

    push_every: int = 1  # batches
    fetch_every: int = 1  # batches; between fetches the replica moves its weights by SGD, or by an optimizer of its own
    overlap: bool = False  # it computes the next gradient while the last one is exchanged
    local: bool = False  # it has an optimizer of its own


class Dealing(msgspec.Struct, frozen=True):
    """How the coordinator deals work, beside what follows from the rest."""

    warm_start: int = 0  # examples that the first replica trains alone
    matched: bool = False  # slower replicas push after fewer batches, so that all push about as often


class Exchanges(msgspec.Struct, frozen=True):
    """The three together. Their defaults are Downpour's: every push is an update, and nobody waits."""

    cadence: Cadence = Cadence()
    rules: Rules = Rules()
    dealing: Dealing = Dealing()

    @property
    def in_rounds(self) -> bool:
        """Rounds are dealt as a whole, a grant for each exchange, so that a lock-step run is the same every time."""
        return self.rules.gather == "mean" and not self.cadence.local and self.rules.waits_for_all

    @property
    def awaited(self) -> bool:
        """Others wait for a replica's exchanges, so it takes part in them also without data."""
        return self.rules.gather == "mean" or self.rules.max_delay is not None

    @property
    def droppable(self) -> bool:
        """A push may come after its round, and to nothing; its lease goes with it, so a lease is a push."""
        return not self.rules.waits_for_all and self.rules.late == "drop"
