"""How much memory of its own a part has, and what the nursery does so that it has no more."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import squall
from squall.errors import SquallError, TaskError
from squall.launchers.building import _tried_aside
from squall.launchers.environment import environment
from squall.runtime.processes import private_bytes
from tests import deep

WIDTH, LAYERS, BATCH, MICROBATCHES, STEPS = 1024, 16, 32, 4, 8


def most(folder: Path, parts: int) -> float:
    """Bytes of the largest process of a replica, seen in its last two steps."""
    notes = folder / str(parts)

    def task() -> squall.Task:
        torch.manual_seed(0)
        inputs, targets = torch.randn(2, BATCH, WIDTH).unbind()
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))
        calls = []

        def loss(model: nn.Module, batch: Any) -> Tensor:
            calls.append(1)
            if len(calls) > (STEPS - 2) * (MICROBATCHES if parts > 1 else 1):
                with notes.open("a") as file:
                    file.write(f"{os.getpid()} {private_bytes()}\n")
            return nn.functional.mse_loss(model(batch[0]), batch[1])

        return squall.Task(
            model=model, loss=loss, train=TensorDataset(inputs, targets), batch_size=BATCH,
            split=squall.Pipeline(microbatches=MICROBATCHES),
        )  # fmt: skip

    settings = squall.Settings(threads=1, snapshot_every_s=None, progress=False, parts=parts)
    strategy = squall.Downpour(replicas=1, optimizer=torch.optim.SGD)
    squall.fit(task, strategy, epochs=STEPS, run_dir=folder / f"run {parts}", settings=settings)
    seen = dict(line.split() for line in notes.read_text().splitlines())
    assert len(seen) == parts
    return max(map(float, seen.values()))


@pytest.mark.cold  # the allocator's settings are read when a process begins
@pytest.mark.usefixtures("without_report")
@deep.only
def test_each_of_two_parts_has_at_most_six_tenths_of_a_whole_replicas_memory(tmp_path: Path) -> None:
    assert most(tmp_path, 2) <= 0.6 * most(tmp_path, 1)


def test_the_users_own_settings_of_the_allocator_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    assert environment(parts=True)["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=2:glibc.malloc.tcache_count=0"
    assert environment()["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=2"


def task_whose_loss(does: Callable[[], None], batch_size: int = 8) -> squall.Task:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        does()
        return nn.functional.mse_loss(model(batch[0]), batch[0])

    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    data = TensorDataset(torch.zeros(8, 2))
    return squall.Task(
        model=model, loss=loss, train=data, batch_size=batch_size, split=squall.Pipeline(microbatches=4)
    )  # fmt: skip


def test_a_split_is_tried_in_a_process_of_its_own() -> None:
    calls: list[int] = []
    starts, told = _tried_aside(task_whose_loss(lambda: calls.append(1)), 2)
    assert (len(starts), starts[0], calls) == (2, 0, [])
    assert "stage 1" in told


def test_what_is_wrong_with_a_split_is_told_by_who_tried_it() -> None:
    with pytest.raises(ValueError, match="fewer examples"):
        _tried_aside(task_whose_loss(lambda: None, batch_size=2), 2)
    with pytest.raises(TaskError, match="ZeroDivisionError"):
        _tried_aside(task_whose_loss(lambda: print(1 / 0)), 2)
    with pytest.raises(SquallError, match="has died: exit status 3"):
        _tried_aside(task_whose_loss(lambda: os._exit(3)), 2)
