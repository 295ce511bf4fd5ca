"""Peer: a parameter server on torch.distributed.rpc (TensorPipe), asynchronous SGD.

One call per exchange carries one flat gradient there and the flat weights back. The server applies one
gradient at a time, under a lock; the weights are not copied before they are sent, so that a fetch may see
part of a later update, as Hogwild allows: a copy would make the exchange slower.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from benchmarks.namespaces import INTERFACE, Link
from benchmarks.peers import PeerUnavailable
from benchmarks.peers.common import (
    EXCHANGE_LR,
    FlatModel,
    Gate,
    OptimizerName,
    Placed,
    accurate,
    flat_optimizer,
    launch,
    median_seconds,
    train_for,
    train_until,
    warm_up,
)
from benchmarks.workloads import Workload

SERVER = 0  # rank; replica r is rank r + 1
# Without the one that reads another process's memory, which would also reach into another namespace.
BETWEEN_NAMESPACES: dict[str, Any] = {"_transports": ["shm", "uv"], "_channels": ["basic"]}


def samples_per_second(
    workload: Workload, replicas: int, seconds: float, threads: int = 1, slow_ratio: float = 0.0,
    link: Link | None = None,
) -> float:  # fmt: skip
    """Samples per second of all replicas together; replicas and server have `threads` torch threads each.

    With a `link`, the server and one of two replicas are on one side, and the other replica is on the other.
    """
    _check()
    placed = None if link is None else Placed(link, (0, 0, 1))
    args = workload, replicas, seconds, slow_ratio, None
    return sum(launch(_work, 1 + replicas, *args, threads=threads, placed=placed))


def seconds_to_accuracy(workload: Workload, replicas: int, target: float = 0.97) -> float:
    """Seconds until the weights that replica 0 last fetched, evaluated by it, first reach `target`."""
    _check()
    return launch(_work, 1 + replicas, workload, replicas, 0.0, 0.0, target)[1]


def exchange_seconds(elements: int, optimizer: OptimizerName, repeats: int) -> float:
    """Median seconds to push a float32 gradient, apply it on the server and hold the new weights.

    The weights arrive in a tensor of the caller's own, which is used as it is.
    """
    _check()
    return launch(_exchange_work, 2, elements, optimizer, repeats)[1]


def _check() -> None:
    if not rpc.is_available():
        raise PeerUnavailable("this build of torch has no torch.distributed.rpc")


class Server:
    """One flat parameter and its optimizer."""

    def __init__(self, weights: Tensor, optimizer: OptimizerName, lr: float) -> None:
        self.parameter = nn.Parameter(weights)
        self.optimizer = flat_optimizer(self.parameter, optimizer, lr)
        self.lock = threading.Lock()

    def exchange(self, gradient: Tensor) -> Tensor:
        with self.lock:
            self.parameter.grad = gradient
            self.optimizer.step()
        return self.parameter.detach()


_served: list[Server] = []  # in the server's process: the one server; a function's call skips RRef's lookups


def _push_and_fetch(gradient: Tensor) -> Tensor:
    return _served[0].exchange(gradient)


def _call(gradient: Tensor) -> Tensor:
    weights: Tensor = rpc.rpc_sync("rank0", _push_and_fetch, args=(gradient,))
    return weights


@contextmanager
def _connected(rank: int, processes: int, gate: Gate) -> Iterator[None]:
    """RPC is up for all inside; leaving waits for everybody's calls to end."""
    ways = BETWEEN_NAMESPACES if os.environ["TP_SOCKET_IFNAME"] == INTERFACE else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method=Path(gate.folder, "rpc").as_uri(), **ways)
    warnings.filterwarnings("ignore", message="You are using a Backend")  # raised by init_rpc's own code
    rpc.init_rpc(  # type: ignore[no-untyped-call,unused-ignore]
        f"rank{rank}", rank=rank, world_size=processes, rpc_backend_options=options
    )
    try:
        yield
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    rpc.shutdown()


def _serve(gate: Gate, processes: int, make: Callable[[], Server]) -> float:
    _served.append(make())
    with _connected(SERVER, processes, gate):
        gate.meet()
    return 0.0


def _work(
    rank: int,
    gate: Gate,
    workload: Workload,
    replicas: int,
    seconds: float,
    slow_ratio: float,
    target: float | None,
) -> float:
    replica = rank - 1
    flat = FlatModel(workload.model())
    if rank == SERVER:
        return _serve(gate, 1 + replicas, lambda: Server(flat.weights(), "sgd", workload.lr))

    def step(inputs: Tensor, labels: Tensor, factor: float) -> float:
        start = time.perf_counter()
        gradient = flat.gradient(inputs, labels, factor)
        computing_s = time.perf_counter() - start
        flat.use(_call(gradient))
        return computing_s

    def done() -> bool:
        if replica == 0 and target is not None and accurate(flat.model, workload, target):
            gate.stop.set()
        return gate.stop.is_set()

    with _connected(rank, 1 + replicas, gate):
        warm_up(step, workload, replica, replicas)
        gate.meet()
        if target is not None:
            return train_until(step, workload, replica, replicas, done)
        return train_for(step, workload, replica, replicas, lambda _, elapsed: elapsed < seconds, slow_ratio)


def _exchange_work(rank: int, gate: Gate, elements: int, optimizer: OptimizerName, repeats: int) -> float:
    if rank == SERVER:
        return _serve(gate, 2, lambda: Server(torch.zeros(elements), optimizer, EXCHANGE_LR))
    gradient = torch.randn(elements)
    with _connected(rank, 2, gate):
        gate.meet()
        return median_seconds(lambda: _call(gradient), repeats)
