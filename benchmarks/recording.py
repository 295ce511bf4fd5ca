"""What it costs to keep a run's schedule: time of an exchange, and bytes.

The time is taken of the recording hosts alone, around hosts that do nothing, because a whole exchange with and without
differs by less than its noise. Between two exchanges the weights are written, as an update does it, so that what looks
at them finds the caches as in a run. Both ends of an exchange are added up, although the replica's part can pass beside
the shard's.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import squall
from benchmarks.results import Section, rounds
from benchmarks.squall_exchange import exchange_seconds
from squall.protocol.effects import Apply, Compute, Effect, Payload, Term, UseWeights
from squall.protocol.events import Event, GradientComputed
from squall.protocol.nodes import Node
from squall.runtime.driver import Host
from squall.runtime.recording import RecordedReplica, RecordedShard
from squall.runtime.schedule import ScheduleWriter

ELEMENTS = 1_000_000
EXCHANGES = 3000
REPLICA = Node("replica", 0)


class _Nothing(Host):
    """A host that does nothing at once."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.store = SimpleNamespace(weights=weights)
        self._computed = GradientComputed(0.0, True, 0.0)

    def perform(self, effect: Effect, now: float) -> Event | None:
        return self._computed if type(effect) is Compute else None


def measure(repeats: int = 15) -> Section:
    print("recording", flush=True)
    section = Section(
        "Keeping the schedule",
        "Both ends of an exchange of 1,000,000 elements keep the schedule that a replay needs. Seconds are of the"
        " recording alone; bytes are of what a push leaves on a shard and, divided among the shards, on the replica.",
    )
    found = rounds(
        {
            "recording": lambda: _recording_seconds()[0],
            "recording, behind": lambda: _recording_seconds()[1],
            "exchange": partial(exchange_seconds, ELEMENTS, "sgd", 300),
            "exchange, recorded": partial(exchange_seconds, ELEMENTS, "sgd", 300, True),
        },
        repeats,
    )
    median = {name: statistics.median(values) * 1e6 for name, values in found.items()}
    share = 100 * median["recording"] / median["exchange"]
    figure = f"{median['recording']:.2g} µs of {median['exchange']:.0f} µs"
    section.below("recording, before the answer is there", figure, share, 1.0, "%")
    section.only("recording, while the shard would wait", f"{median['recording, behind']:.2g} µs")
    section.only("a whole exchange with it", f"{median['exchange, recorded']:.0f} µs")
    for name, strategy in _strategies().items():
        value = bytes_of_a_push(strategy)
        section.below(f"bytes of a push and shard, {name}", f"{value:.1f}", value, 64, "bytes")
    return section


def _recording_seconds() -> tuple[float, float]:
    """Median seconds that the records of an exchange take: before its answer is there, and behind that."""
    torch.set_num_threads(1)
    weights = torch.randn(ELEMENTS)
    step = torch.full_like(weights, 1e-3)
    host: Any = _Nothing(weights)
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder:
        shard = RecordedShard(host, ScheduleWriter(Path(folder) / "shard-0.0"), 4)
        replica = RecordedReplica(host, ScheduleWriter(Path(folder) / "replica-0.0"))
        recorded = [_exchange(shard, replica, weights, step, number) for number in range(1, EXCHANGES)]
        bare = [_exchange(host, host, weights, step, number) for number in range(1, EXCHANGES)]
    held, behind = (
        statistics.median(mine) - statistics.median(theirs) for mine, theirs in zip(zip(*recorded), zip(*bare))
    )
    return held, behind


def _exchange(shard: Any, replica: Any, weights: torch.Tensor, step: torch.Tensor, number: int) -> tuple[float, float]:
    batch = Compute(number // 500, number % 500 * 64, number % 500 * 64 + 64, 0, False, False)
    update = Apply((Term(REPLICA, 0, 1.0, 100_000 + number),), 0.25, 100_000 + number, 1 / 3)
    push, fetch = (Payload(kind, REPLICA, 0, 100_000 + number, 0) for kind in ("gradient", "weights"))
    used = UseWeights(0)
    weights.add_(step)
    began = time.perf_counter()
    replica.perform(batch, 0.0)
    replica.attach(push)
    shard.perform(update, number * 1e-3)
    shard.attach(fetch)
    replica.perform(used, 0.0)
    answered = time.perf_counter()
    shard.rest()
    return answered - began, time.perf_counter() - answered


def _strategies() -> dict[str, squall.Strategy]:
    sgd = partial(torch.optim.SGD, lr=0.01)
    return {
        "downpour, 1 shard": squall.Downpour(replicas=2, optimizer=sgd),
        "downpour, 4 shards": squall.Downpour(replicas=2, shards=4, optimizer=sgd),
        "synchronous, 1 shard": squall.Synchronous(replicas=3, optimizer=sgd),
        "asynchronous SGD, scaled": squall.AsynchronousSGD(replicas=3, optimizer=sgd),
        "diloco, 50 inner steps": squall.DiLoCo(replicas=2, inner_steps=50, optimizer=sgd),
    }


def bytes_of_a_push(strategy: squall.Strategy) -> float:
    """Of a run's schedules, divided by the pushes that its shards applied."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(20_000, 8))
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder:
        directory = Path(folder) / "run"
        settings = squall.Settings(launcher="inline", threads=1, progress=False)
        squall.fit(partial(_task, data), strategy, epochs=1, run_dir=directory, settings=settings)
        files = [path for path in (directory / "schedule" / "0").iterdir() if path.suffix not in (".json", ".pickle")]
        return sum(path.stat().st_size for path in files) / _pushes(files, strategy)


def _pushes(files: list[Path], strategy: squall.Strategy) -> int:
    from squall.runtime.records import Applied, records

    replicas = strategy.recipe().replicas
    shards = [path for path in files if path.name.startswith("shard")]
    applied = [record for path in shards for record in records(path, replicas) if isinstance(record, Applied)]
    return sum(len(record.update.terms) for record in applied)


def _task(data: torch.utils.data.TensorDataset) -> squall.Task:
    return squall.Task(model=torch.nn.Linear(8, 64), loss=_loss, train=data, batch_size=16)


def _loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    found: torch.Tensor = model(batch[0]).square().mean()
    return found


if __name__ == "__main__":
    print(measure().markdown())
