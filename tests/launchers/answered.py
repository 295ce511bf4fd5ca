"""Data of 100 rows, and a `predict` that stands still at example 57 until somebody says that it may go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import squall

EXAMPLES, BATCH = 100, 5


def rows() -> Tensor:
    """[100, 3], of which the first column is the example's number."""
    return torch.arange(EXAMPLES * 3.0).reshape(EXAMPLES, 3) / 3


def task() -> squall.Task:
    data = TensorDataset(rows(), rows().sum(1, keepdim=True))
    model = nn.Linear(3, 1)
    return squall.Task(
        model=model, loss=lambda model, batch: (model(batch[0]) - batch[1]).abs().mean() / 1e3, train=data
    )


def data() -> TensorDataset:
    return TensorDataset(rows())


def predict(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    folder = Path(os.environ.get("HOLDS", ""))  # it is not where other machines are
    if folder.name and (batch[0][:, 0] == 57).any() and not (folder / "go").exists():
        (folder / f"here-{os.getpid()}").touch()
        signal.pause()
    return {"number": batch[0][:, 0].long(), "output": model(batch[0])}
