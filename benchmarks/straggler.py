"""Samples a second when one of two replicas sleeps nine times its own step."""

from __future__ import annotations

import statistics

from benchmarks.peers import ddp, hogwild, ray_actor, rpc
from benchmarks.results import Section, median_ratio, rounds
from benchmarks.squall_training import downpour, samples_per_second
from benchmarks.workloads import speech_mlp

SECONDS = 6.0
SLOW = 9.0


def measure(repeats: int = 3) -> Section:
    print("straggler", flush=True)
    workload = speech_mlp()
    found = rounds(
        {
            "squall": lambda: samples_per_second(workload, downpour(workload, 2), SECONDS, slow_ratio=SLOW),
            "squall, overlap": lambda: samples_per_second(
                workload, downpour(workload, 2, overlap=True), SECONDS, slow_ratio=SLOW
            ),
            "torch RPC": lambda: rpc.samples_per_second(workload, 2, SECONDS, slow_ratio=SLOW),
            "Ray actor": lambda: ray_actor.samples_per_second(workload, 2, SECONDS, slow_ratio=SLOW),
            "Hogwild": lambda: hogwild.samples_per_second(workload, 2, SECONDS, slow_ratio=SLOW),
            "DDP on Gloo": lambda: ddp.samples_per_second(workload, 2, SECONDS, slow_ratio=SLOW),
        },
        repeats,
    )
    section = Section("A straggler", "Samples a second of two replicas, one of them sleeping 9 x its own step.")
    servers = [name for name in ("torch RPC", "Ray actor") if name in found]
    best = max(servers, key=lambda name: statistics.median(found[name]))
    for ours, bound in (("squall", 1.05), ("squall, overlap", 1.3)):
        ratio = median_ratio(found[ours], found[best])
        section.at_least(ours, _rate(found[ours]), f"best server, {best} {_rate(found[best])}", ratio, bound)
    for name in ("Hogwild", "DDP on Gloo"):
        section.only(name, _rate(found[name]))
    return section


def _rate(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f}/s"


if __name__ == "__main__":
    print(measure().markdown())
