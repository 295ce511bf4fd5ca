"""What all peers share, so that they differ only in how gradients and weights travel.

Start-up: a peer's processes are new ones (spawned, or Ray's own), one torch thread each unless told
otherwise. Each builds its model and takes WARM_UP_STEPS whole steps with a loss multiplied by zero, which
exercise everything and leave the weights as they were. Then all meet, and the clocks start.

Speed: each replica trains until its own clock shows `seconds`, and the result is the sum of the replicas'
samples / elapsed. DDP's replicas have to stop at the same step, so they agree on a number of steps first.

Straggler: after every step replica 1 sleeps `slow_ratio` x the time its own computation took (forward,
backward, own optimizer; not the wait for others).

Accuracy: replica 0 evaluates the whole test set at the end of its part of every epoch, inside its training
loop, on its own clock; the result is that clock when the target is first met. Evaluation is paid for by all
peers alike; asynchronous peers' other replicas train on during it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, islice
from multiprocessing.synchronize import Barrier, Event
from typing import Any, Literal

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.namespaces import INTERFACE, Link
from benchmarks.workloads import Workload

WARM_UP_STEPS = 5
MAX_EPOCHS = 500
EXCHANGE_LR = 0.01
START_TIMEOUT_S = 120.0

OptimizerName = Literal["sgd", "adagrad"]
Step = Callable[[Tensor, Tensor, float], float]  # inputs, labels, factor on the loss -> seconds of computing


@dataclass(frozen=True)
class Gate:
    """How the spawned processes of one measurement wait for each other."""

    barrier: Barrier  # of all processes
    stop: Event  # set once the target is met
    folder: str  # for the rendezvous file; removed afterwards

    def meet(self) -> None:
        self.barrier.wait(START_TIMEOUT_S)


@dataclass(frozen=True)
class Placed:
    """Processes on the two machines of a link."""

    link: Link
    sides: tuple[int, ...]  # by rank


def launch(
    work: Callable[..., float], processes: int, *args: object, threads: int = 1, placed: Placed | None = None
) -> list[float]:  # fmt: skip
    """Run `work(rank, gate, *args)` in new processes; their results by rank. One that fails ends them all."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as folder:
        gate = Gate(context.Barrier(processes), context.Event(), folder)
        mp.start_processes(  # type: ignore[attr-defined,no-untyped-call,unused-ignore]
            _enter, args=(work, gate, threads, placed, results, args), nprocs=processes, start_method="spawn"
        )
        by_rank: dict[int, float] = dict(results.get() for _ in range(processes))
    results.close()
    return [by_rank[rank] for rank in range(processes)]


def _enter(
    rank: int, work: Callable[..., float], gate: Gate, threads: int, placed: Placed | None, results: Any,
    args: tuple[object, ...],
) -> None:  # fmt: skip
    interface = "lo" if placed is None else INTERFACE
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = interface  # Gloo's and RPC's
    with nullcontext() if placed is None else placed.link.inside(placed.sides[rank]):
        torch.set_num_threads(threads)
        results.put((rank, work(rank, gate, *args)))


def backward(model: nn.Module, inputs: Tensor, labels: Tensor, factor: float) -> None:
    """Fresh gradients of the mean cross entropy, in each parameter's `grad`."""
    model.zero_grad(set_to_none=True)
    (factor * cross_entropy(model(inputs), labels)).backward()  # type: ignore[no-untyped-call,unused-ignore]


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, fused=True)


def flat_optimizer(parameter: nn.Parameter, name: OptimizerName, lr: float) -> torch.optim.Optimizer:
    """The fused optimizer that a parameter server keeps for its one flat parameter."""
    if name == "sgd":
        return torch.optim.SGD([parameter], lr=lr, fused=True)
    if name == "adagrad":
        return torch.optim.Adagrad([parameter], lr=lr, fused=True)
    raise ValueError(f"optimizer is 'sgd' or 'adagrad', not {name!r}")


class FlatModel:
    """A replica of a parameter-server peer: its parameters are views of the flat weights last fetched."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = list(model.parameters())
        self.sizes = [p.numel() for p in self.parameters]
        self.flat_gradient = torch.empty(sum(self.sizes))

    def weights(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])

    def use(self, weights: Tensor) -> None:
        """Point the parameters into `weights`: no copy, since a replica only reads them."""
        for parameter, part in zip(self.parameters, torch.split(weights, self.sizes), strict=True):
            parameter.data = part.view_as(parameter)

    def gradient(self, inputs: Tensor, labels: Tensor, factor: float) -> Tensor:
        """The gradient in one flat buffer, good until the next call."""
        backward(self.model, inputs, labels, factor)
        parts = [p.grad.reshape(-1) for p in self.parameters if p.grad is not None]
        return torch.cat(parts, out=self.flat_gradient)


def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((model(inputs).argmax(1) == labels).float().mean())


def accurate(model: nn.Module, workload: Workload, target: float) -> bool:
    return accuracy(model, workload.test_inputs, workload.test_labels) >= target


def batches(workload: Workload, replica: int, replicas: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A replica's batches, epoch after epoch without end."""
    for number in count():
        yield from workload.epoch(number, replica, replicas)


def warm_up(step: Step, workload: Workload, replica: int, replicas: int) -> list[float]:
    """The seconds of computing of each warm-up step."""
    return [step(*batch, 0.0) for batch in islice(batches(workload, replica, replicas), WARM_UP_STEPS)]


def train_for(
    step: Step,
    workload: Workload,
    replica: int,
    replicas: int,
    more: Callable[[int, float], bool],
    slow_ratio: float = 0.0,
) -> float:
    """Train while `more(steps done, seconds elapsed)`; this replica's samples per second."""
    start = time.perf_counter()
    for steps, (inputs, labels) in enumerate(batches(workload, replica, replicas), 1):
        computing_s = step(inputs, labels, 1.0)
        if replica == 1 and slow_ratio > 0.0:
            time.sleep(slow_ratio * computing_s)
        elapsed = time.perf_counter() - start
        if not more(steps, elapsed):
            return steps * workload.batch_size / elapsed
    raise AssertionError("batches() does not end")


def train_until(step: Step, workload: Workload, replica: int, replicas: int, done: Callable[[], bool]) -> float:
    """Train until `done()`, asked at the end of this replica's part of every epoch; seconds elapsed."""
    start = time.perf_counter()
    for number in range(MAX_EPOCHS):
        for inputs, labels in workload.epoch(number, replica, replicas):
            step(inputs, labels, 1.0)
        if done():
            return time.perf_counter() - start
    raise RuntimeError(f"{workload.name}: the target was not met in {MAX_EPOCHS} epochs")


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    """The median time of `repeats` calls, after three that don't count."""
    times: list[float] = []
    for _ in range(3 + repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])
