"""What the simulator says of a replica of 1 and 2 parts on this machine, against what it then does.

In every round the machine is measured as `squall measure --parts 2` does, and then each setting is trained.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch

import squall
from benchmarks.forecast import SECONDS, Found, compare, found
from benchmarks.parts import MICROBATCHES, task
from benchmarks.results import Section
from benchmarks.squall_training import STEADY_AFTER_S
from squall.sim.cluster.measure import measure as measure_machine
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.simulate import simulate

WIDTH, BLOCKS, BATCH = 1024, 4, 512
SPLITS: dict[str, squall.splits.Split] = {
    "pipeline, 1F1B": squall.Pipeline(microbatches=MICROBATCHES),
    "pipeline, GPipe": squall.Pipeline(microbatches=MICROBATCHES, schedule="gpipe"),
    "slices": squall.Tensor({"*.up": "column", "*.down": "row"}),
}
STRATEGY = squall.Downpour(replicas=1, optimizer=partial(torch.optim.SGD, lr=0.01))


def measure(repeats: int = 5) -> Section:
    print("forecast-parts", flush=True)
    section = Section(
        "Forecasts of parts",
        f"A perceptron with {2 * BLOCKS} layers of {WIDTH}, batches of {BATCH}, {MICROBATCHES} microbatches: one"
        " replica of `Downpour` and a shard, simulated on a cluster file that was measured just before, and as they"
        " then ran. Ratio: simulated / real, the median of the rounds.",
    )
    for name, split in SPLITS.items():
        said: dict[str, list[Found]] = defaultdict(list)
        done: dict[str, list[Found]] = defaultdict(list)
        function = partial(task, split, WIDTH, BLOCKS, BATCH)
        for _ in range(repeats):
            cluster = measure_machine(function, STRATEGY, seconds=24, parts=2, busy=True).cluster
            for parts in (1, 2):
                what = f"{parts} part{'s' * (parts > 1)}"
                said[what].append(_predicted(function, cluster, parts))
                done[what].append(_trained(function, parts))
                print(
                    f"  {name}, {what}: {said[what][-1].samples_s:,.0f} said, {done[what][-1].samples_s:,.0f}",
                    flush=True,
                )
        compare(section, said, done, f"{name}, ")
    return section


def _predicted(function: squall.TaskFunction, cluster: Cluster, parts: int) -> Found:
    settings = squall.Settings(threads=1, seconds=3 * SECONDS, snapshot_every_s=None, parts=parts)
    forecast = simulate(function, STRATEGY, cluster, gradients="none", settings=settings)
    return Found(forecast.examples_per_second, 0.0)


def _trained(function: squall.TaskFunction, parts: int) -> Found:
    settings = squall.Settings(
        threads=1, seconds=SECONDS + STEADY_AFTER_S, snapshot_every_s=None, progress=False, parts=parts
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder:
        return found(squall.fit(function, STRATEGY, run_dir=Path(folder) / "run", settings=settings))._replace(
            staleness=0.0
        )


if __name__ == "__main__":
    print(measure().markdown())
