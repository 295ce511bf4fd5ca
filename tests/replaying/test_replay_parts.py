"""A replay of replicas of several parts arrives at the run's weights, bit for bit, by as many processes."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import squall
from squall.record.rows import MemberRow, ProgressRow
from squall.run import Run
from squall.runtime.replay_starts import complete
from squall.runtime.seeds import epoch_order
from tests import deep
from tests.launchers.processes import START_S, Started, wait_for
from tests.rehearsal import assert_replays, same
from tests.tasks import LOCAL, mean_square, numbers, regression

PIPED = Path(__file__).parents[1] / "launchers" / "piped.py"
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Columns(nn.Module):
    """Three branches side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(6, 12), nn.Linear(27, 1)
        self.one, self.two, self.three = (
            nn.Sequential(nn.Linear(12, 9), nn.Dropout(0.2)),
            nn.Linear(12, 9),
            nn.Linear(12, 9),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        front = self.front(inputs)
        return self.back(torch.cat([self.one(front), self.two(front), self.three(front)], 1))


def staged() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 12),
        nn.Linear(12, 1),
    )  # fmt: skip


def sliced() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 9), nn.LayerNorm(9), nn.Linear(9, 1))


SPLITS: dict[str, tuple[Any, Any]] = {
    "pipeline": (staged, squall.Pipeline(microbatches=6)),
    "zero-bubble": (staged, squall.Pipeline(microbatches=6, schedule="zero-bubble")),
    "slices": (sliced, squall.Tensor({"0": "column", "2": "row"})),
    "branches": (Columns, squall.Branches("one", "two", "three")),
}
STRATEGIES: dict[str, squall.Strategy] = {
    "downpour": squall.Downpour(replicas=2, shards=2, push_every=2, overlap=True, optimizer=SGD),
    "averaging": squall.Averaging(replicas=2, every=3, optimizer=SGD),
    "diloco": squall.DiLoCo(replicas=2, optimizer=SGD, inner_steps=3, form="decoupled"),
    "sandblaster": squall.Sandblaster(replicas=2, shards=2, batch="full"),
}
CASES = [
    ("downpour", "pipeline", 2), ("averaging", "slices", 3), ("downpour", "zero-bubble", 2), ("diloco", "pipeline", 3),
    ("downpour", "branches", 3), ("sandblaster", "pipeline", 2), ("sandblaster", "slices", 3),
]  # fmt: skip


@pytest.mark.usefixtures("without_report")
@pytest.mark.filterwarnings("ignore:the model has:RuntimeWarning")  # L-BFGS is no friend of chance, and replays it
@pytest.mark.parametrize(("strategy", "split", "parts"), deep.sweep(CASES, 1))
def test_the_weights_of_replicas_of_parts_are_computed_again(
    strategy: str, split: str, parts: int, run_dir: Path
) -> None:
    model, how = SPLITS[split]
    clipped = {"clip_norm": 1.0} if strategy != "sandblaster" else {}  # which chooses its steps by itself
    task = regression(model, examples=96, batch_size=12, split=how, **clipped)
    assert_replays(
        squall.fit(task, STRATEGIES[strategy], epochs=2, run_dir=run_dir, settings=replace(LOCAL, parts=parts))
    )


def training(directory: Path, *flags: str) -> Started:
    run = Started(directory, "train", str(PIPED), "--run-dir", str(directory), "--shards", "2", "--parts", "2", *flags)
    for replica in range(2):
        run.wait_rows(ProgressRow, lambda row, replica=replica: row.replica == replica)
    return run


@deep.only
@pytest.mark.parametrize("flags", [("--keep-schedule", "last:2"), ()])
def test_across_the_death_of_a_part_an_interrupt_and_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    monkeypatch.setenv("EXAMPLES", "1024")
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = training(directory, "--epochs", "1000", "--snapshot-every-s", "0.4", *flags)
    try:
        run.kill("replica 1 part 1")
        run.wait_rows(MemberRow, lambda row: row.node == "replica-1.1" and row.change == "joined")
        if flags:
            wait_for(lambda: complete(directory / "schedule" / "0", 2), START_S, "a snapshot that is kept")
        run.process.send_signal(signal.SIGINT)
        run.finish()
    finally:
        run.process.kill()
        wait_for(run.gone, 10, "the processes to end")
    trained = sum(row.examples for row in run.rows(ProgressRow))
    again = Started(directory, "resume", str(directory), "--epochs", str(trained // 1024 + 2))
    status, _, error = again.finish()
    assert status == 0, error
    weights = tmp_path / "weights"
    status, output, error = Started(directory, "replay", str(directory), "--check", "--output", str(weights)).finish()
    assert status == 0, error + output
    assert "the same, bit for bit" in output
    found, wanted = load_file(weights), Run(directory).model.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def poisoned(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    loss = mean_square(model, batch)
    return loss * math.nan if (batch[2] == 40).any() else loss


@deep.only
@pytest.mark.usefixtures("without_report")
def test_a_replay_stops_at_an_update_and_at_the_batch_that_made_a_nan(run_dir: Path) -> None:
    data = TensorDataset(*numbers(96).tensors, torch.arange(96))
    task = regression(staged, train=data, batch_size=12, split=squall.Pipeline(microbatches=6), loss=poisoned)
    with pytest.raises(squall.NotFinite):
        squall.fit(task, squall.Downpour(replicas=1, optimizer=SGD), run_dir=run_dir, settings=replace(LOCAL, parts=2))
    found = squall.replay(run_dir, around_nan=True)
    assert found.nan is not None
    assert 40 in epoch_order(0, 0, 96)[found.nan.start : found.nan.stop]
    assert found.nan.parameters, "gradients of the whole model that are not finite"
    first, second = (squall.replay(run_dir, until=number) for number in (1, 2))
    assert (first.versions, second.versions) == ((1,), (2,))
    assert not same(first.model, second.model)


@pytest.mark.usefixtures("without_report")
@deep.only
def test_parts_go_on_without_a_batch_that_gives_nan_twice(run_dir: Path) -> None:
    data = TensorDataset(*numbers(96).tensors, torch.arange(96))
    task = regression(staged, train=data, batch_size=12, split=squall.Pipeline(microbatches=6), loss=poisoned)
    settings = replace(LOCAL, parts=2)
    strategy = squall.Downpour(replicas=2, optimizer=SGD)
    run = squall.fit(task, strategy, epochs=2, run_dir=run_dir, settings=settings, on_nan="skip")
    assert run.summary().examples == 2 * (96 - 12)
    assert "the same, bit for bit" in str(squall.replay(run_dir, check=True))
    found = squall.replay(run_dir, around_nan=True).nan
    assert found is not None
    assert 40 in epoch_order(0, found.epoch, 96)[found.start : found.stop]
