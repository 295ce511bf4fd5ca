"""Samples a second of replicas that share one GPU, against a plain loop on it, and what an exchange moves."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import squall
from benchmarks.results import Section, median_ratio, rounds
from benchmarks.squall_training import STEADY_AFTER_S, downpour, steady
from benchmarks.workloads import Workload, speech_mlp

SECONDS = 3.0
PLAIN = "plain loop"


class NoGpu(Exception):
    """There is none here."""


def plain(workload: Workload) -> float:
    """An ordinary loop, whose batches come from the host as a loader's do."""
    model = workload.model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.lr, fused=True)
    count, epoch, began = 0, 0, time.perf_counter() + STEADY_AFTER_S
    while time.perf_counter() < began + SECONDS:
        for inputs, labels in workload.epoch(epoch):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs.cuda(non_blocking=True)), labels.cuda(non_blocking=True))
            loss.backward()
            optimizer.step()
            loss.item()  # as a run looks at each
            count += len(labels) * (time.perf_counter() >= began)
        epoch += 1
    return count / SECONDS


def moved(workload: Workload) -> float:
    """Microseconds in which a gradient goes into pinned memory, and weights come from there."""
    count = sum(parameter.numel() for parameter in workload.model().parameters())
    there, here = torch.zeros(count, device="cuda"), torch.zeros(count).pin_memory()
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        began = time.perf_counter()
        here.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def task(workload: Workload) -> squall.Task:
    return squall.Task(
        model=workload.model(), train=workload.train_set(), batch_size=workload.batch_size,
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
    )  # fmt: skip


def trained(workload: Workload, strategy: squall.Strategy) -> float:
    settings = squall.Settings(seconds=SECONDS + STEADY_AFTER_S, snapshot_every_s=None, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        return steady(squall.fit(
            partial(task, workload), strategy, device="cuda", settings=settings, run_dir=Path(folder) / "run"
        ))  # fmt: skip


def apart(function: Callable[[Workload], float], workload: Workload) -> float:
    """In a process of its own: one that has touched CUDA cannot be forked."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, (workload,))


def measure(repeats: int = 3) -> Section:
    if not torch.cuda.is_available():
        raise NoGpu("torch sees no CUDA GPU")
    print("GPU", flush=True)
    workload = speech_mlp()
    sgd = partial(torch.optim.SGD, lr=workload.lr)
    strategies = {
        "downpour, 1 replica": downpour(workload, 1),
        "downpour, 2 replicas": downpour(workload, 2),
        "downpour, 2 replicas, every 8": downpour(workload, 2, exchange_every=8),
        "downpour, 2 replicas, overlap": downpour(workload, 2, overlap=True),
        "synchronous, 2 replicas": squall.Synchronous(replicas=2, optimizer=sgd),
        "all-reduce, 2 replicas": squall.AllReduce(replicas=2, optimizer=sgd),
    }
    measures: dict[str, Callable[[], float]] = {PLAIN: partial(apart, plain, workload)}
    measures |= {name: partial(trained, workload, strategy) for name, strategy in strategies.items()}
    found = rounds(measures, repeats)
    section = Section(
        "On a GPU",
        f"Samples a second of replicas that share one {torch.cuda.get_device_name()}: 7.2 million parameters, SGD,"
        f" batch {workload.batch_size} of a replica; the plain loop is one process on it. The shards, and the sums of"
        " all-reduce (Gloo), are on the host: each exchange brings a gradient from the GPU, and weights to it.",
    )
    against = f"{PLAIN} {_rate(found[PLAIN])}"
    for name in strategies:
        section.compared(name, _rate(found[name]), against, median_ratio(found[name], found[PLAIN]))
    section.only("gradient from the GPU, and weights to it", f"{apart(moved, workload):,.0f} µs")
    return section


def _rate(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f}/s"


if __name__ == "__main__":
    print(measure().markdown())
