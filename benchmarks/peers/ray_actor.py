"""Peer: a parameter server that is a Ray actor, and replicas that are Ray actors; asynchronous SGD.

One call per exchange carries one flat gradient there and the flat weights back, as numpy arrays in Ray's
shared-memory object store: each is copied once, into the store, and read where it lies. The weights read
are immutable, so nobody sees half of an update.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.namespaces import Link
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

Flat = NDArray[np.float32]  # [elements]
OBJECTS_IN_STORE = 8  # gradients and weights that may lie in Ray's object store at once, per replica

SIDE = "side{}"  # what a node of Ray has where there are two


def samples_per_second(
    workload: Workload, replicas: int, seconds: float, threads: int = 1, slow_ratio: float = 0.0,
    link: Link | None = None,
) -> float:  # fmt: skip
    """Samples per second of all replicas together; replicas and server have `threads` torch threads each.

    With a `link`, the server and one of two replicas are on one side, and the other replica is on the other.
    """
    _check()
    placed = None if link is None else Placed(link, (0,))
    return launch(_drive, 1, workload, replicas, threads, seconds, slow_ratio, None, link, placed=placed)[0]


def seconds_to_accuracy(workload: Workload, replicas: int, target: float = 0.97) -> float:
    """Seconds until the weights that replica 0 last fetched, evaluated by it, first reach `target`."""
    _check()
    return launch(_drive, 1, workload, replicas, 1, 0.0, 0.0, target)[0]


def exchange_seconds(elements: int, optimizer: OptimizerName, repeats: int, threads: int = 1) -> float:
    """Median seconds to push a float32 gradient, apply it in the actor and hold the new weights.

    The weights are read in place in the object store, without a copy.
    """
    _check()
    return launch(_exchange_work, 1, elements, optimizer, repeats, threads)[0]


def _check() -> None:
    if importlib.util.find_spec("ray") is None:
        raise PeerUnavailable("Ray is not installed: pip install ray")


def _tensor(array: Flat) -> Tensor:
    """A view; Ray's arrays are read-only, and so is the use that is made of them here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


class Server:
    """One flat parameter and its optimizer; Ray runs an actor's calls one after another."""

    def __init__(self, weights: Flat, optimizer: OptimizerName, lr: float, threads: int) -> None:
        torch.set_num_threads(threads)
        self.parameter = nn.Parameter(torch.from_numpy(weights.copy()))
        self.optimizer = flat_optimizer(self.parameter, optimizer, lr)

    def exchange(self, gradient: Flat) -> Flat:
        self.parameter.grad = _tensor(gradient)
        self.optimizer.step()
        weights: Flat = self.parameter.detach().numpy()
        return weights


class Replica:
    """Computes gradients on its part of the data."""

    def __init__(self, server: Any, workload: Workload, replica: int, replicas: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.server, self.workload, self.replica, self.replicas = server, workload, replica, replicas
        self.flat = FlatModel(workload.model())

    def step(self, inputs: Tensor, labels: Tensor, factor: float) -> float:
        start = time.perf_counter()
        gradient = self.flat.gradient(inputs, labels, factor)
        computing_s = time.perf_counter() - start
        self.flat.use(_call(self.server, gradient.numpy()))
        return computing_s

    def warm_up(self) -> None:
        warm_up(self.step, self.workload, self.replica, self.replicas)

    def train_for(self, seconds: float, slow_ratio: float) -> float:
        return train_for(
            self.step,
            self.workload,
            self.replica,
            self.replicas,
            lambda _, elapsed: elapsed < seconds,
            slow_ratio,
        )

    def train_until(self, target: float) -> float:
        """Replica 0 evaluates; the others train until their processes end with Ray."""

        def done() -> bool:
            return self.replica == 0 and accurate(self.flat.model, self.workload, target)

        return train_until(self.step, self.workload, self.replica, self.replicas, done)


def _call(server: Any, gradient: Flat) -> Tensor:
    import ray

    return _tensor(ray.get(server.exchange.remote(gradient)))


@contextmanager
def _two_nodes(link: Link, elements: int, folder: str) -> Iterator[None]:
    """A Ray of our own with a node on each side of a link, gone afterwards."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    temporary = str(Path(folder, "ray"))
    store = OBJECTS_IN_STORE * 2 * 4 * elements + 2**28  # bytes
    cluster = Cluster()
    for side in (0, 1):
        own: dict[str, Any] = {
            "num_cpus": 2,
            "resources": {SIDE.format(side): 2},
            "object_store_memory": store,
            "temp_dir": temporary,
        }
        with link.inside(side):
            cluster.add_node(node_ip_address=link.hosts[side], include_dashboard=False, **own)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def _ray(processes: int, elements: int, folder: str) -> Iterator[None]:
    """A Ray of our own on this machine, gone afterwards."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's switch for listening on loopback only
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # the coming default; silences a warning about it
    import ray

    ray.init(
        address="local",
        num_cpus=processes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECTS_IN_STORE * processes * 4 * elements + 2**28,  # bytes
        _temp_dir=str(Path(folder, "ray")),
    )
    try:
        yield
    finally:
        ray.shutdown()


def _drive(
    rank: int,
    gate: Gate,
    workload: Workload,
    replicas: int,
    threads: int,
    seconds: float,
    slow_ratio: float,
    target: float | None,
    link: Link | None = None,
) -> float:
    weights = FlatModel(workload.model()).weights().numpy()
    with _ray(1 + replicas, weights.size, gate.folder) if link is None else _two_nodes(link, weights.size, gate.folder):
        import ray

        def on(side: int) -> dict[str, Any]:
            return {} if link is None else {"resources": {SIDE.format(side): 1}}

        server = ray.remote(Server).options(**on(0)).remote(weights, "sgd", workload.lr, threads)
        actors: list[Any] = [
            ray.remote(Replica).options(**on(number)).remote(server, workload, number, replicas, threads)
            for number in range(replicas)
        ]
        ray.get([actor.warm_up.remote() for actor in actors])
        if target is None:
            return float(sum(ray.get([actor.train_for.remote(seconds, slow_ratio) for actor in actors])))
        times = [actor.train_until.remote(target) for actor in actors]
        return float(ray.get(times[0]))


def _exchange_work(rank: int, gate: Gate, elements: int, optimizer: OptimizerName, repeats: int, threads: int) -> float:
    gradient = torch.randn(elements).numpy()
    with _ray(1, elements, gate.folder):
        import ray

        server = ray.remote(Server).remote(np.zeros_like(gradient), optimizer, EXCHANGE_LR, threads)
        return median_seconds(lambda: _call(server, gradient), repeats)
