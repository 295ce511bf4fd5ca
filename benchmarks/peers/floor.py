"""The floor: the arithmetic and the copies of an exchange inside a process, which exchanges nothing with anybody."""

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
from squall.runtime.arena import newest_first
from squall.runtime.processes import keep_freed_memory


def samples_per_second(workload: Workload, replicas: int, seconds: float) -> float:
    """Samples per second of all replicas together, each for itself with one thread.

    A step is a gradient, its one copy into a flat vector, a fused SGD step there, and one copy of the weights. Weights
    are each process's own, so that two vectors are kept where a server keeps one.
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
        for target, source in zip(newest_first(fetched), newest_first(parameter.detach())):
            target.copy_(source)
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
