"""All-reduce against the same two processes under bare DDP; and what a kill costs, against torchrun."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from setproctitle import getproctitle
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import squall
from benchmarks.peers import ddp, elastic
from benchmarks.results import Section, median_ratio, rounds
from benchmarks.squall_training import samples_per_second
from benchmarks.steps import Outage, Steps, outage
from benchmarks.workloads import digits_mlp, speech_mlp

SECONDS = 15.0  # a run imports once what its report needs, which is a tenth of a second of its training
REPLICAS, FATAL, KILLED_S = 3, 200, 4.0  # of the training in which one is killed: in which step, and how long it is


def measure(repeats: int = 5, kills: int = 5) -> Section:
    print("all-reduce", flush=True)
    workload = speech_mlp()
    strategy = squall.AllReduce(replicas=2, optimizer=partial(torch.optim.SGD, lr=workload.lr))
    found = rounds(
        {
            "all-reduce": lambda: samples_per_second(workload, strategy, SECONDS),
            "DDP on Gloo": lambda: ddp.samples_per_second(workload, 2, SECONDS),
        },
        repeats,
    )
    section = Section(
        "All-reduce",
        "Samples a second of two replicas together, SGD, batch 64; ours look whether the mean gradient is finite before"
        " it moves the weights (2.5 % of this step), which bare DDP does not. Then one of three replicas is killed"
        f" (digits 64-256-256-10, batch 32) in step {FATAL}: seconds from the beginning of the last step before it to"
        " the end of the first after it, by whoever is first; and from the kill until three processes have made a step"
        " again.",
    )
    ours, theirs = found["all-reduce"], found["DDP on Gloo"]
    rates = (f"{statistics.median(values):,.0f}/s" for values in (ours, theirs))
    section.at_least("all-reduce", next(rates), f"DDP on Gloo {next(rates)}", median_ratio(ours, theirs), 0.97)
    outages: dict[str, list[Outage]] = {"all-reduce": [], "torchrun": []}
    for _ in range(kills):
        for name, train in (("all-reduce", _train), ("torchrun", _restarted)):
            outages[name].append(_outage(train))
            print(f"  {name}: {outages[name][-1]}", flush=True)
    stood = {name: statistics.median(each.seconds for each in found) for name, found in outages.items()}
    section.below("without progress", f"{stood['all-reduce']:.2f} s", stood["all-reduce"], 1.0, "s")
    ratio = stood["torchrun"] / stood["all-reduce"]
    section.compared("without progress", f"{stood['all-reduce']:.2f} s", f"torchrun {stood['torchrun']:.2f} s", ratio)
    whole = {name: statistics.median(each.whole_after_s for each in found) for name, found in outages.items()}
    ratio = whole["torchrun"] / whole["all-reduce"]
    section.compared("until all train", f"{whole['all-reduce']:.2f} s", f"torchrun {whole['torchrun']:.2f} s", ratio)
    section.only("steps to be made again, torchrun", f"{outages['torchrun'][0].steps}")
    return section


def _outage(train: Callable[[Path], None]) -> Outage:
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder:
        train(Path(folder))
        return outage(Path(folder))


def _restarted(folder: Path) -> None:
    elastic.train(folder, REPLICAS, FATAL)


def _train(folder: Path) -> None:
    strategy = squall.AllReduce(replicas=REPLICAS, optimizer=partial(torch.optim.SGD, lr=0.05))
    settings = squall.Settings(threads=1, snapshot_every_s=None, progress=False, seconds=KILLED_S)
    squall.fit(partial(_task, folder), strategy, run_dir=folder / "run", settings=settings)


def _task(folder: Path) -> squall.Task:
    workload = digits_mlp()
    return squall.Task(
        model=workload.model(), loss=_Loss(folder), train=workload.train_set(), batch_size=workload.batch_size
    )


class _Loss:
    """It notes when steps begin."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps: Steps | None = None

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        role = getproctitle()
        if role.startswith("squall replica "):
            self._steps = self._steps or Steps(self._folder)
            self._steps.begin(dies_in=FATAL if role.startswith("squall replica 1 ") else 0)
        return cross_entropy(model(batch[0]), batch[1])


if __name__ == "__main__":
    print(measure().markdown())
