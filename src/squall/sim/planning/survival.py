"""What failures leave of a strategy's speed in the long run.

A short simulation would see none of the failures of a day. So each is charged with what the protocol makes of it:
all to first order, for causes that seldom come together. Simulations with many failures agree (tests).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from squall.protocol.nodes import Node
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.placement import Placement
from squall.sim.cluster.ring import FORM_S
from squall.strategies import Recipe
from squall.strategies.work import Loop

SNAPSHOT_EVERY_S = 60.0  # of a run with the usual settings


@dataclass(frozen=True, kw_only=True)
class Survival:
    """Shares of the time or of the work, 0 to 1."""

    away: float  # replicas that are gone, mean
    stalled: float  # time that the others wait until it is known that one is gone
    lost: float  # examples that a replica had computed and not yet pushed when it went
    stopped: float  # time in which a shard or the coordinator is gone, or what a restart has lost is repeated

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
    failures = [failure for of_one in going for failure in of_one]
    rate = sum(failure.often for failure in failures)  # a second, of all replicas
    patience_s = _patience_s(recipe, round_s)
    formed_s = 0.0 if recipe.shards else FORM_S  # twice: without the one that is gone, and with its successor
    ends = [_failures_of(placement, cluster, "shard", index) for index in range(recipe.shards)]
    ends.append(_failures_of(placement, cluster, "coordinator", 0))
    cost_s = sum(end.often * (end.gone_s + end.repeated_s) for of_one in ends for end in of_one)
    return Survival(
        away=sum(_share(sum(f.often * (f.gone_s + f.noticed_s) for f in of_one)) for of_one in going) / len(going),
        stalled=_share(sum(f.often * max(0.0, f.noticed_s + 2 * formed_s - patience_s) for f in failures)),
        lost=_share(rate / len(going) * round_s / 2),
        stopped=_share(cost_s),
    )


def _patience_s(recipe: Recipe, round_s: float) -> float:
    """How long the others go on without a replica: a bounded delay, or for good where rounds may close without it."""
    if not isinstance(recipe.work, Loop):
        return 0.0
    rules = recipe.loop.exchanges.rules
    awaited = recipe.loop.exchanges.awaited and rules.waits_for_all
    return (rules.max_delay or 0) * round_s if awaited else math.inf


def _share(ratio: float) -> float:
    """Of the whole time, where `ratio` is time lost to time used."""
    return ratio / (1 + ratio)


class _Failure(NamedTuple):
    """Of a process, for one cause."""

    often: float  # a second
    gone_s: float
    noticed_s: float  # until others know
    repeated_s: float  # of the run, if it is of a shard or the coordinator: only with its machine it has no successor


def _failures_of(placement: Placement, cluster: Cluster, role: str, index: int) -> list[_Failure]:
    place = placement.of(Node(role, index))
    law = cluster.failures.get(role)
    found, repeated_s = list[_Failure](), SNAPSHOT_EVERY_S / 2
    if law is not None:
        again_s = repeated_s if law.fatal else 0.0
        found.append(_Failure(1 / law.every_s, law.repair_s, cluster.between.latency_s, again_s))
    for preemption in cluster.preemptions:
        if preemption.machine == place.kind.name and preemption.every_s is not None:
            chance = min(preemption.count / place.kind.count, 1.0)
            often = chance / preemption.every_s
            found.append(_Failure(often, preemption.for_s, cluster.lost_after_s, repeated_s))
    return found
