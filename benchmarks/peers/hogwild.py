"""Peer: Hogwild (Niu et al. 2011) as torch.multiprocessing offers it.

The model lies in shared memory; every process computes its own gradients and steps on the shared weights
at once, without a lock.
"""

from __future__ import annotations

import time

from torch import Tensor, nn

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
    """Samples per second of all replicas together, each with `threads` torch threads."""
    shared = workload.model().share_memory()
    return sum(launch(_work, replicas, shared, workload, replicas, seconds, slow_ratio, None, threads=threads))


def seconds_to_accuracy(workload: Workload, replicas: int, target: float = 0.97) -> float:
    """Seconds until the shared model's test accuracy, evaluated by replica 0, first reaches `target`."""
    shared = workload.model().share_memory()
    return launch(_work, replicas, shared, workload, replicas, 0.0, 0.0, target)[0]


def _work(
    rank: int,
    gate: Gate,
    model: nn.Module,
    workload: Workload,
    replicas: int,
    seconds: float,
    slow_ratio: float,
    target: float | None,
) -> float:
    optimizer = sgd(model, workload.lr)

    def step(inputs: Tensor, labels: Tensor, factor: float) -> float:
        start = time.perf_counter()
        backward(model, inputs, labels, factor)  # gradients are this process's own; weights are shared
        optimizer.step()
        return time.perf_counter() - start

    def done() -> bool:
        if rank == 0 and target is not None and accurate(model, workload, target):
            gate.stop.set()
        return gate.stop.is_set()

    warm_up(step, workload, rank, replicas)
    gate.meet()
    if target is None:
        return train_for(step, workload, rank, replicas, lambda _, elapsed: elapsed < seconds, slow_ratio)
    return train_until(step, workload, rank, replicas, done)
