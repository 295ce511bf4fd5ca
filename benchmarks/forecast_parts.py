"""What the simulator says of a replica of 1 and 2 parts on this machine, against what it then does.

In every round the machine is measured as `squall measure --parts 2` does, and then each setting is trained.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import squall
from benchmarks.forecast import SECONDS, THROUGHPUT_WITHIN, Found, compare, found
from benchmarks.parts import MICROBATCHES, task
from benchmarks.results import Section
from benchmarks.squall_training import STEADY_AFTER_S
from squall.sim.cluster.measure import measure as measure_machine
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.simulate import simulate

WIDTH, BLOCKS, BATCH = 1024, 4, 512
SPEECH, SPEECH_BATCH = (440, 2560, 2560, 2560, 2560, 8192), 100  # as in papers/model_parallel.py
STRATEGY = squall.Downpour(replicas=1, optimizer=partial(torch.optim.SGD, lr=0.01))


def speech() -> squall.Task:
    """DistBelief's network for speech, 42 M parameters: every layer in equal slices, gathered behind each."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(4 * SPEECH_BATCH, SPEECH[0]), torch.randint(SPEECH[-1], (4 * SPEECH_BATCH,))
    layers = [each for sizes in pairwise(SPEECH) for each in (nn.Linear(*sizes), nn.ReLU())]
    return squall.Task(
        model=nn.Sequential(*layers[:-1]), loss=_loss, train=TensorDataset(inputs, targets), batch_size=SPEECH_BATCH,
        split=squall.Tensor({str(at): "gathered" for at in range(0, len(layers), 2)}),
    )  # fmt: skip


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


TASKS: dict[str, squall.TaskFunction] = {
    "pipeline, 1F1B": partial(task, squall.Pipeline(microbatches=MICROBATCHES), WIDTH, BLOCKS, BATCH),
    "pipeline, GPipe": partial(
        task, squall.Pipeline(microbatches=MICROBATCHES, schedule="gpipe"), WIDTH, BLOCKS, BATCH
    ),
    "slices": partial(task, squall.Tensor({"*.up": "column", "*.down": "row"}), WIDTH, BLOCKS, BATCH),
    "speech, 42 M": speech,
}


def measure(repeats: int = 5) -> Section:
    print("forecast-parts", flush=True)
    section = Section(
        "Forecasts of parts",
        f"A perceptron with {2 * BLOCKS} layers of {WIDTH}, batches of {BATCH}, {MICROBATCHES} microbatches: one"
        " replica of `Downpour` and a shard, simulated on a cluster file that was measured just before, and as they"
        " then ran; and DistBelief's network for speech (42 M parameters, batches of 100, each layer in slices)."
        " Ratio: simulated / real, the median of the rounds.",
    )
    for name, function in TASKS.items():
        said: dict[str, list[Found]] = defaultdict(list)
        done: dict[str, list[Found]] = defaultdict(list)
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
        faster = [[two.samples_s / one.samples_s for one, two in zip(*found.values())] for found in (said, done)]
        figures = [statistics.median(values) for values in faster]
        section.within(
            f"{name}, speed-up of 2 parts", f"{figures[0]:.2f} x", f"real {figures[1]:.2f} x",
            statistics.median(a / b for a, b in zip(*faster)), THROUGHPUT_WITHIN,
        )  # fmt: skip
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
