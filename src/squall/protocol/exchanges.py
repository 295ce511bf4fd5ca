"""What of a strategy the loop's machines know: when replicas exchange, what shards make of it, how work is dealt."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from squall.protocol.messages import Exchange, Factors


class Cadence(msgspec.Struct, frozen=True):
    """When a replica exchanges, and what moves its weights in between."""

    push_every: int = 1  # batches
    fetch_every: int = 1  # batches; in between the replica moves its weights by SGD, or by an optimizer of its own
    overlap: bool = False  # the replica computes the next gradient while the last one is exchanged
    local: bool = False  # the replica has an optimizer of its own


class Rules(msgspec.Struct, frozen=True):
    """What a shard makes of pushes and fetches."""

    gather: str = "each"  # "each" | "mean"
    max_delay: int | None = None  # exchanges; None: no bound
    scaled: bool = False  # learning rates are divided by the push's staleness
    backup: int = 0  # replicas that a round does not wait for
    quorum: int | None = None  # pushes that close a round; None: those of all but the backup replicas
    grace: float = 0.0  # how long a round stays open beyond that, as a share of the last round's duration
    late: str = "drop"  # a push that comes after its round is dropped, or goes into the next: "fold"
    whole: int = 0  # batches of a whole push; a round with fewer is that much less of a step. 0: every round is whole

    @property
    def waits_for_all(self) -> bool:
        return self.backup == 0 and self.quorum is None

    def rate_of_push(self, staleness: int) -> float:
        return 1 / staleness if self.scaled and staleness else 1.0

    def rate_of_round(self, pushes: Sequence[Exchange]) -> float:
        """Momentum moves the weights as far for a few batches as for hundreds: a round that is cut short must not."""
        whole = self.whole * len(pushes)
        return min(1.0, sum(push.batches for push in pushes) / whole) if whole else 1.0


class Dealing(msgspec.Struct, frozen=True):
    """How the coordinator deals work, beside what follows from the rest."""

    warm_start: int = 0  # examples that the first replica trains alone
    matched: bool = False  # slower replicas push after fewer batches, so that all push about as often


class Exchanges(msgspec.Struct, frozen=True):
    """Cadence, rules and dealing together. Their defaults are Downpour's: every push is an update, and nobody waits."""

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


def mean_factors(pushes: Sequence[Exchange]) -> Factors:
    """What a round makes of the learning rates that its replicas' loops want: their mean, weighed by examples."""
    first = pushes[0].factors
    if all(push.factors == first for push in pushes):
        return first
    examples = sum(push.examples for push in pushes)
    groups = max(len(push.factors) for push in pushes)
    wanted = [(push.factors + (1.0,) * (groups - len(push.factors)), push.examples / examples) for push in pushes]
    return tuple(sum((factors[group] or 0.0) * share for factors, share in wanted) for group in range(groups))
