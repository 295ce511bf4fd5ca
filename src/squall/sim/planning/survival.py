"""What failures leave of a strategy's speed in the long run.

A short simulation would see none of the failures of a day. So each is charged with what the protocol makes of it:
all to first order, for causes that seldom come together. Simulations with many failures agree (tests).
"""

from __future__ import annotations

from dataclasses import dataclass

from squall.protocol.nodes import Node
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.placement import Placement
from squall.sim.cluster.rehearsal import NOTICED_AFTER_S
from squall.strategies import Recipe

SNAPSHOT_EVERY_S = 60.0  # of a run with the usual settings


@dataclass(frozen=True, kw_only=True)
class Survival:
    """Shares of the time or of the work, 0 to 1."""

    away: float  # replicas that are gone, mean
    stalled: float  # time that the others wait until it is known that one is gone
    lost: float  # examples that a replica had computed and not yet pushed when it went
    stopped: float  # time that the whole run is gone, or repeats what was done since its last snapshot

    @property
    def left(self) -> float:
        """Of the speed without failures."""
        return (1 - self.away) * (1 - self.stalled) * (1 - self.lost) * (1 - self.stopped)


def survival_of(recipe: Recipe, cluster: Cluster, round_s: float) -> Survival:
    """What failures leave of the speed.

    Args:
        recipe: of the strategy.
        cluster: with its failures; of the preemptions those count that come again and again.
        round_s: seconds between two pushes of a replica.
    """
    placement = Placement(cluster, recipe)
    going = [_failures_of(placement, cluster, "replica", index) for index in range(recipe.replicas)]
    rate = sum(often for often, _ in going)  # a second, of all replicas
    rules = recipe.loop.exchanges.rules
    # How long the others go on without a replica: a bounded delay, or for good where rounds may close without it.
    patience_s = (rules.max_delay or 0) * round_s if rules.waits_for_all else NOTICED_AFTER_S
    noticed_s = max(0.0, NOTICED_AFTER_S - patience_s) if recipe.loop.exchanges.awaited else 0.0
    ends = [_failures_of(placement, cluster, "shard", index) for index in range(recipe.shards)]
    ends.append(_failures_of(placement, cluster, "coordinator", 0))
    cost_s = sum(often * (gone_s + SNAPSHOT_EVERY_S / 2) for often, gone_s in ends)
    return Survival(
        away=sum(_share(often * (gone_s + NOTICED_AFTER_S)) for often, gone_s in going) / len(going),
        stalled=_share(rate * noticed_s),
        lost=_share(rate / len(going) * round_s / 2),
        stopped=_share(cost_s),
    )


def _share(ratio: float) -> float:
    """Of the whole time, where `ratio` is time lost to time used."""
    return ratio / (1 + ratio)


def _failures_of(placement: Placement, cluster: Cluster, role: str, index: int) -> tuple[float, float]:
    """How often a second a process goes, and for how many seconds in the mean."""
    place = placement.of(Node(role, index))
    failure = cluster.failures.get(role)
    causes = [(1 / failure.every_s, failure.repair_s)] if failure is not None else []
    for preemption in cluster.preemptions:
        if preemption.machine == place.kind.name and preemption.every_s is not None:
            chance = min(preemption.count / place.kind.count, 1.0)
            causes.append((chance / preemption.every_s, preemption.for_s))
    often = sum(rate for rate, _ in causes)
    return often, sum(rate * seconds for rate, seconds in causes) / often if often else 0.0
