"""Seconds to 97 % on the digits, after start-up: a network so small that every microsecond of an exchange shows."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

from benchmarks.peers import ddp, hogwild, plain, ray_actor, rpc
from benchmarks.results import Section, median_ratio, rounds
from benchmarks.squall_training import downpour, seconds_to_accuracy
from benchmarks.workloads import Workload, digits_mlp


def measure(repeats: int = 15) -> Section:
    """In every round all train in another order of the data, which alone moves the time by a quarter."""
    print("small", flush=True)
    found: dict[str, list[float]] = {}
    for number in range(repeats):
        for name, values in rounds(_measures(replace(digits_mlp(), order_seed=1000 * number)), 1).items():
            found.setdefault(name, []).extend(values)
    section = Section("A small network", "Seconds to 97 % test accuracy: digits, 64-256-256-10, batch 32, SGD 0.05.")
    for ours in ("squall", "squall, every 2"):
        mine = found[ours]
        for name, bound in (("plain", 1.0), ("DDP on Gloo", 3.0)):
            section.at_least(ours, _s(mine), f"{name} {_s(found[name])}", median_ratio(found[name], mine), bound)
    for name in ("squall, overlap", "Hogwild", "torch RPC", "Ray actor"):
        if name in found:
            section.only(name, _s(found[name]))
    return section


def _measures(workload: Workload) -> dict[str, Callable[[], float]]:
    return {
        "squall": lambda: seconds_to_accuracy(workload, downpour(workload, 2)),
        "squall, overlap": lambda: seconds_to_accuracy(workload, downpour(workload, 2, overlap=True)),
        "squall, every 2": lambda: seconds_to_accuracy(workload, downpour(workload, 2, exchange_every=2)),
        "plain": lambda: plain.seconds_to_accuracy(workload, 1),
        "DDP on Gloo": lambda: ddp.seconds_to_accuracy(workload, 2),
        "Hogwild": lambda: hogwild.seconds_to_accuracy(workload, 2),
        "torch RPC": lambda: rpc.seconds_to_accuracy(workload, 2),
        "Ray actor": lambda: ray_actor.seconds_to_accuracy(workload, 2),
    }


def _s(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} s"


if __name__ == "__main__":
    print(measure().markdown())
