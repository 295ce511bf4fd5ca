"""The floor: what has to be computed and copied, inside one process that exchanges nothing with anybody.

A parameter server can be faster only by leaving some of it out.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from benchmarks.peers.common import (
    EXCHANGE_LR,
    FlatModel,
    Gate,
    OptimizerName,
    flat_optimizer,
    launch,
    median_seconds,
    train_for,
    warm_up,
)
from benchmarks.workloads import Workload
from squall.runtime.processes import keep_freed_memory


def samples_per_second(workload: Workload, replicas: int, seconds: float) -> float:
    """Samples per second of all replicas together, each for itself with one thread.

    A step is a gradient, its one copy into a flat vector, a fused SGD step there, and one copy of the weights.
    """
    return sum(launch(_train, replicas, workload, replicas, seconds))


def _train(rank: int, gate: Gate, workload: Workload, replicas: int, seconds: float) -> float:
    keep_freed_memory()
    flat = FlatModel(workload.model())
    parameter = nn.Parameter(flat.weights())
    fetched = parameter.detach().clone()
    flat.use(fetched)
    optimizer = flat_optimizer(parameter, "sgd", workload.lr)

    def step(inputs: Tensor, labels: Tensor, factor: float) -> float:
        start = time.perf_counter()
        parameter.grad = flat.gradient(inputs, labels, factor)
        optimizer.step()
        fetched.copy_(parameter.detach())
        return time.perf_counter() - start

    warm_up(step, workload, rank, replicas)
    gate.meet()
    return train_for(step, workload, rank, replicas, lambda _, elapsed: elapsed < seconds)


def exchange_seconds(elements: int, optimizer: OptimizerName, repeats: int) -> float:
    """Median seconds of one fused step on a flat float32 parameter and one copy of it, on one thread."""
    return launch(_work, 1, elements, optimizer, repeats)[0]


def _work(rank: int, gate: Gate, elements: int, optimizer: OptimizerName, repeats: int) -> float:
    parameter = nn.Parameter(torch.zeros(elements))
    parameter.grad = torch.randn(elements)
    fetched = torch.empty(elements)
    server = flat_optimizer(parameter, optimizer, EXCHANGE_LR)

    def exchange() -> None:
        server.step()
        fetched.copy_(parameter.detach())

    return median_seconds(exchange, repeats)
