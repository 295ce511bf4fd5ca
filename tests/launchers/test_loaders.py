"""Processes that load data work ahead of the training, where nobody asks for leases as well."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import Dataset

import squall
from squall.record.rows import EventRow
from squall.report import Reader, audit
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


class Fatal(Told):
    """Once it kills the process that loads example 40."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if index == 40 and not (self._directory / "40").exists():
            super().__getitem__(index)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.usefixtures("without_report")
def test_a_replica_whose_loader_is_killed_is_replaced_as_if_it_had_been_killed_itself(
    run_dir: Path, tmp_path: Path
) -> None:
    """As the kernel does where memory runs out."""
    task = regression(train=Fatal(tmp_path), batch_size=8, shuffle=False, loader={"num_workers": 1})
    run = squall.fit(task, squall.Downpour(replicas=1), run_dir=run_dir, settings=squall.Settings(progress=False))
    assert run.summary().status == "finished"
    with closing(Reader(run_dir / "run.sqlite")) as reader:
        lost = [row.text for row in reader.rows(EventRow) if row.kind == "lost"]
        assert audit(reader).complete
    assert lost == ["replica 0: another of its processes was lost"]
