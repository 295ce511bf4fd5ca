"""Peer: DistributedDataParallel on Gloo, one process a replica, in lock step."""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.namespaces import Link
from benchmarks.peers import PeerUnavailable
from benchmarks.peers.common import (
    Gate,
    Placed,
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
    workload: Workload, replicas: int, seconds: float, threads: int = 1, slow_ratio: float = 0.0,
    link: Link | None = None,
) -> float:  # fmt: skip
    """Samples per second of all replicas together, each with `threads` torch threads.

    The number of steps is agreed on beforehand, from three timed ones. DDP's backward waits for the others,
    so what the straggler's sleep is a multiple of is the median step without an all-reduce, all replicas
    computing at once. With a `link`, there is a replica on each of its sides.
    """
    _check()
    placed = None if link is None else Placed(link, (0, 1))
    return sum(launch(_work, replicas, workload, replicas, seconds, slow_ratio, None, threads=threads, placed=placed))


def seconds_to_accuracy(workload: Workload, replicas: int, target: float = 0.97) -> float:
    """Seconds until rank 0's test accuracy first reaches `target`; the others wait while it evaluates.

    A step takes the mean gradient of `replicas` batches, so the learning rate is multiplied by `replicas`
    (the linear scaling rule, Goyal et al. 2017): an epoch then moves the weights as far as elsewhere.
    """
    _check()
    return launch(_work, replicas, workload, replicas, 0.0, 0.0, target)[0]


def _check() -> None:
    if not dist.is_available() or not dist.is_gloo_available():
        raise PeerUnavailable("this build of torch has no Gloo")


def _work(
    rank: int,
    gate: Gate,
    workload: Workload,
    replicas: int,
    seconds: float,
    slow_ratio: float,
    target: float | None,
) -> float:
    rendezvous = Path(gate.folder, "ddp").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=replicas)
    try:
        return _train(rank, workload, replicas, seconds, slow_ratio, target)
    finally:
        gc.collect()  # DDP's cycles would keep Gloo's threads alive past the interpreter, which can abort
        dist.destroy_process_group()


def _train(
    rank: int,
    workload: Workload,
    replicas: int,
    seconds: float,
    slow_ratio: float,
    target: float | None,
) -> float:
    model = DistributedDataParallel(workload.model(), gradient_as_bucket_view=True)
    optimizer = sgd(model, workload.lr * replicas)
    computing_s = 0.0

    def step(inputs: Tensor, labels: Tensor, factor: float) -> float:
        backward(model, inputs, labels, factor)
        optimizer.step()
        return computing_s

    def step_alone(inputs: Tensor, labels: Tensor, factor: float) -> float:
        start = time.perf_counter()
        with model.no_sync():
            backward(model, inputs, labels, factor)
        optimizer.step()
        return time.perf_counter() - start

    def done() -> bool:
        met = torch.tensor(int(rank == 0 and target is not None and accurate(model.module, workload, target)))
        dist.broadcast(met, src=0)
        return bool(met)

    if slow_ratio > 0.0:
        computing_s = statistics.median(warm_up(step_alone, workload, rank, replicas))
    warm_up(step, workload, rank, replicas)
    dist.barrier()
    if target is not None:
        return train_until(step, workload, rank, replicas, done)

    def pace(steps: int) -> float:
        return train_for(step, workload, rank, replicas, lambda done, _: done < steps, slow_ratio)

    planned = torch.tensor(seconds * pace(3) / workload.batch_size)
    dist.all_reduce(planned, op=dist.ReduceOp.MIN)
    return pace(max(1, round(planned.item())))
