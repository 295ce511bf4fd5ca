"""What the engine adds to a training step: one replica and one shard, the 7 M-parameter network, one thread each."""

from __future__ import annotations

import statistics

import torch
from torch.nn.functional import cross_entropy

from benchmarks.peers import floor
from benchmarks.peers.common import launch, median_seconds
from benchmarks.results import Section, median_ratio, rounds
from benchmarks.squall_training import downpour, samples_per_second
from benchmarks.workloads import Workload, speech_mlp

SECONDS = 6.0


def measure(repeats: int = 5) -> Section:
    print("overhead", flush=True)
    workload = speech_mlp()
    elements = sum(p.numel() for p in workload.model().parameters())
    found = rounds(
        {
            "plain step": lambda: launch(_plain_step, 1, workload)[0],
            "copy": lambda: launch(_copy, 1, elements)[0],
            "exchange floor": lambda: floor.exchange_seconds(elements, "sgd", 50),
            "squall": lambda: _step(workload, overlap=False),
            "squall, overlap": lambda: _step(workload, overlap=True),
        },
        repeats,
    )
    section = Section(
        "Overhead of a step",
        "Seconds of a whole step. Plain: forward and backward without an optimizer. Bound: plain + one copy of the"
        " gradient + the exchange floor; with overlap, plain + one copy.",
    )
    alone = [sum(parts) for parts in zip(found["plain step"], found["copy"], found["exchange floor"])]
    hidden = [sum(parts) for parts in zip(found["plain step"], found["copy"])]
    for name, bound in (("squall", alone), ("squall, overlap", hidden)):
        section.at_most(name, _ms(found[name]), f"sum {_ms(bound)}", median_ratio(found[name], bound), 1.1)
    for name in ("plain step", "copy", "exchange floor"):
        section.only(name, _ms(found[name]))
    return section


def _step(workload: Workload, overlap: bool) -> float:
    strategy = downpour(workload, 1, overlap=overlap)
    return workload.batch_size / samples_per_second(workload, strategy, SECONDS)


def _plain_step(rank: int, gate: object, workload: Workload) -> float:
    model = workload.model()
    batches = [batch for epoch in range(2) for batch in workload.epoch(epoch)]
    position = iter(range(10**9))

    def step() -> None:
        inputs, labels = batches[next(position) % len(batches)]
        model.zero_grad(set_to_none=True)
        cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call,unused-ignore]

    return median_seconds(step, 100)


def _copy(rank: int, gate: object, elements: int) -> float:
    source, target = torch.randn(elements), torch.zeros(elements)
    return median_seconds(lambda: target.copy_(source), 50)


def _ms(values: list[float]) -> str:
    return f"{statistics.median(values) * 1e3:.3g} ms"


if __name__ == "__main__":
    print(measure().markdown())
