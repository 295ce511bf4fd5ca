"""How long models take, side by side: in turn, several times over, so that a noisy moment falls on all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

ROUNDS = 15
BLOCK_S = 0.004  # a model that takes less is called again in the same round


def medians(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds that each call takes, the median over the rounds."""
    return {name: statistics.median(seconds) for name, seconds in rounds(runs).items()}


def rounds(runs: Mapping[str, Callable[[], object]], count: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds that each call takes in each round, the mean of as many calls as fill `BLOCK_S`."""
    repeats = {name: max(1, round(BLOCK_S / max(_seconds(run, 2), 1e-7))) for name, run in runs.items()}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(count):
        for name, run in runs.items():
            taken[name].append(_seconds(run, repeats[name]))
    return taken


def _seconds(run: Callable[[], object], repeats: int) -> float:
    if repeats > 1:
        run()  # whatever ran before has the caches, which a long call does not feel
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - began) / repeats
