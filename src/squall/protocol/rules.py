"""What of a strategy a shard must know, and how far its updates move."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from squall.protocol.messages import Exchange, Factors


class Rules(msgspec.Struct, frozen=True):
    """What of a strategy a shard must know."""

    gather: str = "each"  # "each" | "mean"
    max_delay: int | None = None  # exchanges; None: no bound
    scaled: bool = False  # learning rates are divided by the push's staleness
    backup: int = 0  # replicas that a round does not wait for
    quorum: int | None = None  # pushes that close a round; None: those of all but the backup replicas
    grace: float = 0.0  # how long a round stays open beyond that, as a share of the last round's duration
    late: str = "drop"  # or "fold": what happens to a push that comes after its round
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


def mean_factors(pushes: Sequence[Exchange]) -> Factors:
    """What a round makes of the learning rates that its replicas' loops want: their mean, weighed by examples."""
    first = pushes[0].factors
    if all(push.factors == first for push in pushes):
        return first
    examples = sum(push.examples for push in pushes)
    groups = max(len(push.factors) for push in pushes)
    wanted = [(push.factors or (1.0,) * groups, push.examples / examples) for push in pushes]
    return tuple(sum((factors[group] or 0.0) * share for factors, share in wanted) for group in range(groups))
