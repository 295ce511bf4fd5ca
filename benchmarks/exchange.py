"""Push + apply + fetch through a real shard process, against the same work in one process and against peers.

Floor: one pass of the fused optimizer over weights and gradient (SGD reads 8 and writes 4 bytes an element, Adagrad
12 and 8) and one copy of the weights (reads 4, writes 4). Nothing that crosses a process can be below it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

from benchmarks.peers import floor, ray_actor, rpc
from benchmarks.peers.common import OptimizerName
from benchmarks.results import Section, median_ratio, rounds
from benchmarks.squall_exchange import exchange_seconds

SIZES = {1_000: 2000, 1_000_000: 200, 10_000_000: 30, 50_000_000: 10}  # elements -> repeats
FLOOR_BOUNDS = {1_000_000: 1.6, 10_000_000: 1.25, 50_000_000: 1.25}
PEER_BOUNDS = {1_000: 4.0, 10_000_000: 3.0}
THREADED = 10_000_000  # elements that are worth a second thread on the server, where its only replica waits


def measure(repeats: int = 3) -> Section:
    section = Section(
        "Exchange",
        "Push a float32 gradient, apply the fused optimizer, fetch the weights. The floor is that work in one process.",
    )
    optimizers: tuple[OptimizerName, ...] = ("sgd", "adagrad")
    for optimizer in optimizers:
        for elements, count in SIZES.items():
            _measure(section, elements, optimizer, count, repeats)
    return section


def _measure(section: Section, elements: int, optimizer: OptimizerName, count: int, repeats: int) -> None:
    print(f"exchange, {elements:,} elements, {optimizer}", flush=True)
    kinds: dict[str, Callable[..., float]] = {"squall": exchange_seconds, "floor": floor.exchange_seconds}
    if elements in PEER_BOUNDS:
        kinds |= {"torch RPC": rpc.exchange_seconds, "Ray actor": ray_actor.exchange_seconds}
    if elements == THREADED:
        kinds |= {
            "squall, 2 threads": partial(exchange_seconds, shard_threads=2),
            "Ray actor, 2 threads": partial(ray_actor.exchange_seconds, threads=2),
        }
    found = rounds({name: partial(kind, elements, optimizer, count) for name, kind in kinds.items()}, repeats)
    ours = found["squall"]
    what, figure = f"{elements:,} elements, {optimizer}", _ms(ours)
    if elements == 1_000:
        section.below(what, figure, statistics.median(ours) * 1e6, 150, "µs")
    if elements in FLOOR_BOUNDS:
        ratio = median_ratio(ours, found["floor"])
        section.at_most(what, figure, f"floor {_ms(found['floor'])}", ratio, FLOOR_BOUNDS[elements])
    for peer in ("torch RPC", "Ray actor"):
        if peer in found:
            ratio = median_ratio(found[peer], ours)
            section.at_least(what, figure, f"{peer} {_ms(found[peer])}", ratio, PEER_BOUNDS[elements])
    if elements == THREADED:
        mine, theirs = found["squall, 2 threads"], found["Ray actor, 2 threads"]
        against, ratio = f"Ray actor, 2 threads {_ms(theirs)}", median_ratio(theirs, mine)
        section.at_least(f"{what}, 2 threads", _ms(mine), against, ratio, PEER_BOUNDS[elements])


def _ms(values: list[float]) -> str:
    return f"{statistics.median(values) * 1e3:.3g} ms"


if __name__ == "__main__":
    print(measure().markdown())
