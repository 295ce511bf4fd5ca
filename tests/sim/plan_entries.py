"""Made-up results of simulations, for what orders, words and draws them."""

from __future__ import annotations

from typing import Any

import squall
from squall.sim.cluster.forecast import Forecast
from squall.sim.planning.candidates import Candidate
from squall.sim.planning.entries import RankingEntry
from squall.sim.planning.speed import Speed
from squall.sim.planning.survival import Survival
from squall.strategies import Strategy

DOWNPOUR = squall.Downpour(replicas=8)
SYNCHRONOUS = squall.Synchronous(replicas=8)
DILOCO = squall.DiLoCo(replicas=8, inner_steps=100)
AVERAGING = squall.Averaging(replicas=8)


def entry(
    strategy: Strategy, rate: float = 1000.0, *, name: str | None = None, left: float = 1.0, **options: Any
) -> RankingEntry:
    """`reached_s` (0: tried, not reached), `examples` and `status` make a trial; the rest are fields of `Speed`."""
    trial = None
    if "reached_s" in options:
        reached_s = options.pop("reached_s") or None
        trial = forecast(strategy, reached_s, options.pop("examples", 1000), options.pop("status", "finished"))
    fields = {
        "idle": 0.0, "shard_busy": 0.1, "bytes_per_second": 1e6, "network": 0.1, "staleness": 0.0, "kept": 1.0,
        "round_s": 0.1, "simulated_s": 1.0, "wall_s": 0.1,
    }  # fmt: skip
    candidate = Candidate(name or type(strategy).__name__.lower(), strategy)
    return RankingEntry(
        candidate=candidate, speed=Speed(examples_per_second=rate, **fields | options), trial=trial,
        survival=Survival(away=1 - left, stalled=0.0, lost=0.0, stopped=0.0),
    )  # fmt: skip


def forecast(strategy: Strategy, reached_s: float | None, examples: int, status: str) -> Forecast:
    recipe = strategy.recipe()
    return Forecast(
        strategy="", replicas=recipe.replicas, shards=recipe.shards, status=status, reason="NaN in a loss",
        training_s=reached_s or 40.0, examples=examples, examples_per_second=1.0, epochs=1.0, updates=1, idle=0.0,
        shard_busy=0.0, staleness_mean=0.0, staleness_max=0, staleness={}, bytes=0, bytes_per_second=0.0, goodput=1.0,
        lost=0, restarts=0, metrics={"accuracy": 0.5}, reached_s=reached_s, messages=1, wall_s=1.0,
    )  # fmt: skip
