"""`squall predict`: how it scales, and what it takes beside the model itself."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import squall
from benchmarks.results import Section, median_ratio, rounds
from benchmarks.workloads import speech_mlp

EXAMPLES, BATCH = 40_000, 256
SETTINGS = squall.Settings(threads=1, progress=False)


def measure(repeats: int = 7) -> Section:
    print("predict", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        trained = squall.fit(task, squall.SingleProcess(), steps=1, run_dir=Path(folder) / "run", settings=SETTINGS)
        measures = {
            "1 worker": lambda: rate(trained, 1),
            "2 workers": lambda: rate(trained, 2),
            "bare loop": lambda: bare_rate(trained),
        }
        found = rounds(measures, repeats)
    section = Section(
        "Predictions",
        f"Examples a second of a perceptron with 7.2 million parameters, {EXAMPLES:,} frames of 440 numbers in batches"
        f" of {BATCH}, one thread a process, from the first batch to the last file of a range: the most likely of 1,024"
        " classes and its logarithm. Bare: the same loop in one process, which writes nothing.",
    )
    one, two, bare = (found[name] for name in measures)
    section.at_least("two workers", _a_second(two), f"one {_a_second(one)}", median_ratio(two, one), 1.9)
    section.compared("one worker", _a_second(one), f"bare {_a_second(bare)}", median_ratio(one, bare))
    return section


def task() -> squall.Task:
    workload = speech_mlp()
    loss = nn.functional.cross_entropy
    train = workload.train_set()
    return squall.Task(model=workload.model(), loss=lambda m, b: loss(m(b[0]), b[1]), train=train, batch_size=64)


def frames() -> TensorDataset:
    return TensorDataset(torch.randn(EXAMPLES, 440, generator=torch.Generator().manual_seed(0)))


def most_likely(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    best = model(batch[0]).log_softmax(1).max(1)
    return {"log_probability": best.values, "label": best.indices}


def rate(trained: squall.Run, replicas: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        found = squall.predict(
            trained.directory, frames, predict=most_likely, replicas=replicas, out=Path(folder) / "out",
            batch_size=BATCH, settings=SETTINGS,
        )  # fmt: skip
        told: float = found.to_json_dict()["examples_per_second"]
    return told


@torch.inference_mode()
def bare_rate(trained: squall.Run) -> float:
    threads, (data,) = torch.get_num_threads(), frames().tensors
    torch.set_num_threads(1)
    try:
        began = time.perf_counter()
        for start in range(0, EXAMPLES, BATCH):
            most_likely(trained.model, [data[start : start + BATCH]])
        return EXAMPLES / (time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)


def _a_second(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f} examples/s"


if __name__ == "__main__":
    print(measure().markdown())
