"""Samples a second of the 7 M-parameter network: two replicas with one thread each, against peers."""

from __future__ import annotations

import statistics

from benchmarks.peers import ddp, floor, hogwild, plain, ray_actor, rpc
from benchmarks.results import Section, median_ratio, rounds
from benchmarks.squall_training import downpour, samples_per_second
from benchmarks.workloads import speech_mlp

SECONDS = 6.0


def measure(repeats: int = 9) -> Section:
    print("throughput", flush=True)
    workload = speech_mlp()
    found = rounds(
        {
            "squall": lambda: samples_per_second(workload, downpour(workload, 2), SECONDS),
            "squall, overlap": lambda: samples_per_second(workload, downpour(workload, 2, overlap=True), SECONDS),
            "squall, every 8": lambda: samples_per_second(workload, downpour(workload, 2, exchange_every=8), SECONDS),
            "plain, 1 thread": lambda: plain.samples_per_second(workload, 1, SECONDS),
            "plain, 2 threads": lambda: plain.samples_per_second(workload, 1, SECONDS, threads=2),
            "floor": lambda: floor.samples_per_second(workload, 2, SECONDS),
            "Hogwild": lambda: hogwild.samples_per_second(workload, 2, SECONDS),
            "DDP on Gloo": lambda: ddp.samples_per_second(workload, 2, SECONDS),
            "torch RPC": lambda: rpc.samples_per_second(workload, 2, SECONDS),
            "Ray actor": lambda: ray_actor.samples_per_second(workload, 2, SECONDS),
        },
        repeats,
    )
    section = Section(
        "Throughput",
        "Samples a second of two replicas together, SGD, batch 64. Floor: two processes that exchange nothing, each"
        " of which computes and copies what a step with an exchange does.",
    )
    comparisons: list[tuple[str, str, float | None]] = [
        ("squall", "DDP on Gloo", 1.15), ("squall", "torch RPC", 1.3), ("squall", "Ray actor", 1.6),
        ("squall, overlap", "Ray actor", 1.6),
        ("squall, every 8", "Hogwild", 0.8), ("squall, every 8", "plain, 2 threads", 1.0),
        ("squall", "floor", None), ("squall, overlap", "floor", None), ("floor", "Ray actor", None),
    ]  # fmt: skip
    for ours, theirs, bound in comparisons:
        if theirs not in found:
            continue
        ratio = median_ratio(found[ours], found[theirs])
        row = ours, _rate(found[ours]), f"{theirs} {_rate(found[theirs])}", ratio
        if bound is None:
            section.compared(*row)
        else:
            section.at_least(*row, bound)
    section.only("plain, 1 thread", _rate(found["plain, 1 thread"]))
    return section


def _rate(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f}/s"


if __name__ == "__main__":
    print(measure().markdown())
