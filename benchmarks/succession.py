"""What it costs that a shard can be succeeded: a journal of its events, and its optimizer's state in shared memory."""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks.peers.common import OptimizerName
from benchmarks.results import Section, median_ratio, rounds
from benchmarks.squall_exchange import exchange_seconds

SIZES = {1_000: 2000, 1_000_000: 300, 10_000_000: 40}  # elements -> repeats
BOUND = 1.02  # at a million elements and more


def measure(repeats: int = 25) -> Section:
    section = Section(
        "Succession",
        "The exchange of above with a shard that leaves to a successor what it needs, against one that does not.",
    )
    optimizers: tuple[OptimizerName, ...] = ("sgd", "adagrad")
    for optimizer in optimizers:
        for elements, count in SIZES.items():
            print(f"succession, {elements:,} elements, {optimizer}", flush=True)
            ours = partial(exchange_seconds, elements, optimizer, count)
            found = rounds({"left": ours, "not left": partial(ours, succeeded=False)}, repeats)
            what, ratio = f"{elements:,} elements, {optimizer}", median_ratio(found["left"], found["not left"])
            figure, against = (f"{statistics.median(found[name]) * 1e3:.3g} ms" for name in ("left", "not left"))
            section.at_most(what, figure, against, ratio, BOUND if elements > 1_000 else 1.2)
    return section


if __name__ == "__main__":
    print(measure().markdown())
