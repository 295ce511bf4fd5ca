"""Peer: an ordinary PyTorch loop in one process, with fused SGD."""

from __future__ import annotations

import time

from torch import Tensor

from benchmarks.peers.common import (
    Gate,
    accurate,
    backward,
    launch,
    sgd,
    train_for,
    train_until,
    warm_up,
)
from benchmarks.workloads import Workload


def samples_per_second(
    workload: Workload, replicas: int, seconds: float, threads: int = 1, slow_ratio: float = 0.0
) -> float:
    """Samples per second of one process with `threads` torch threads; `replicas` has to be 1."""
    if slow_ratio != 0.0:
        raise ValueError("a plain loop has no replica 1 to slow down: leave slow_ratio at 0")
    _check(replicas)
    return sum(launch(_work, 1, workload, seconds, None, threads=threads))


def seconds_to_accuracy(workload: Workload, replicas: int, target: float = 0.97) -> float:
    """Seconds until the test accuracy first reaches `target`; evaluation happens in the loop and counts."""
    _check(replicas)
    return launch(_work, 1, workload, 0.0, target)[0]


def _check(replicas: int) -> None:
    if replicas != 1:
        raise ValueError(f"a plain loop is 1 replica, not {replicas}")


def _work(rank: int, gate: Gate, workload: Workload, seconds: float, target: float | None) -> float:
    model = workload.model()
    optimizer = sgd(model, workload.lr)

    def step(inputs: Tensor, labels: Tensor, factor: float) -> float:
        start = time.perf_counter()
        backward(model, inputs, labels, factor)
        optimizer.step()
        return time.perf_counter() - start

    warm_up(step, workload, 0, 1)
    if target is None:
        return train_for(step, workload, 0, 1, lambda _, elapsed: elapsed < seconds)
    return train_until(step, workload, 0, 1, lambda: accurate(model, workload, target))
