"""Processes that load data work ahead of the training, where nobody asks for leases as well."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import Dataset

import squall
from tests.tasks import mean_square, numbers, regression

WAIT_S = 1.0  # for a batch that may come: where none is known of, none does


class Told(Dataset[tuple[Any, ...]]):
    """Leaves a file where each example is loaded."""

    def __init__(self, directory: Path) -> None:
        self._data, self._directory = numbers(96), directory

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        (self._directory / str(index)).touch()
        return *self._data[index], index


@pytest.mark.usefixtures("without_report")
@pytest.mark.parametrize("strategy", [squall.AllReduce(replicas=1), squall.SingleProcess()], ids=["group", "alone"])
def test_the_next_batch_is_loaded_while_one_is_computed_on(
    strategy: squall.Strategy, run_dir: Path, tmp_path: Path
) -> None:
    loads, ahead = tmp_path / "loads", tmp_path / "ahead"
    loads.mkdir()

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        last, until = int(batch[2].max()), time.monotonic() + WAIT_S
        while last < 95 and not ahead.exists() and time.monotonic() < until:
            if any(int(file.name) > last for file in loads.iterdir()):
                ahead.touch()
        return mean_square(model, batch)

    task = regression(train=Told(loads), batch_size=8, shuffle=False, loss=loss, loader={"num_workers": 1})
    run = squall.fit(task, strategy, run_dir=run_dir, settings=squall.Settings(progress=False))
    assert run.summary().examples == 96
    assert ahead.exists()
