"""A replay of all-reduce between replicas of several parts arrives at the run's weights, bit for bit, by as many."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import nn

import squall
from squall.runtime.seeds import epoch_order
from tests import deep
from tests.launchers.processes import Started
from tests.rehearsal import assert_replays, same
from tests.replaying.test_replay_all_reduce import (
    NUMBERED,
    assert_replayed,
    finished_under_kills,
    interrupted,
    poisoned,
    trained,
)
from tests.replaying.test_replay_parts import PIPED, SPLITS
from tests.tasks import LOCAL, regression

pytestmark = pytest.mark.usefixtures("without_report")
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01)
SCHEDULE = {"schedule": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9), "clip_norm": 0.5}
CASES: list[tuple[str, int, int, Any, dict[str, Any]]] = [
    ("slices", 3, 3, ADAMW, SCHEDULE),
    ("pipeline", 2, 2, SGD, {}),
    ("branches", 3, 2, SGD, {"loader": {"num_workers": 1}}),
    ("zero-bubble", 2, 3, ADAMW, {}),
]


@deep.only
@pytest.mark.parametrize(("split", "parts", "replicas", "optimizer", "options"), deep.sweep(CASES, 1))
def test_the_weights_of_replicas_of_parts_are_computed_again(
    split: str, parts: int, replicas: int, optimizer: Any, options: dict[str, Any], run_dir: Path
) -> None:
    model, how = SPLITS[split]
    task = regression(model, examples=102, batch_size=12, split=how, **options)
    strategy = squall.AllReduce(replicas=replicas, optimizer=optimizer)
    assert_replays(squall.fit(task, strategy, epochs=3, run_dir=run_dir, settings=replace(LOCAL, parts=parts)))


def training(directory: Path, replicas: int, epochs: int) -> Started:
    size = ("--replicas", str(replicas), "--parts", "2", "--epochs", str(epochs))
    return Started(directory, "train", str(PIPED), "--run-dir", str(directory), "--strategy", "all_reduce", *size)


@deep.only
def test_across_the_deaths_of_parts_an_interrupt_and_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newcomers' parts take what the same part of a survivor has; the first member is lost as well."""
    monkeypatch.setenv("EXAMPLES", "1024")
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = training(directory, 2, 1000)
    interrupted(run, {"replica 1 part 1": "replica-1.1", "replica 0": "replica-0.1"})
    epochs = str(trained(run) // 1024 + 2)
    status, _, error = Started(directory, "resume", str(directory), "--epochs", epochs, "--replicas", "3").finish()
    assert status == 0, error
    assert_replayed(directory, tmp_path / "weights")


@deep.only
@pytest.mark.parametrize("seed", deep.seeds(1, 3))
def test_kills_at_any_moment(tmp_path: Path, seed: int) -> None:
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = training(directory, 3, 6)
    finished_under_kills(run, random.Random(seed))
    assert_replayed(directory, tmp_path / "weights")


def staged() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 1))


def test_a_replay_stops_at_an_update_and_at_the_batch_that_made_a_nan(run_dir: Path) -> None:
    """Which is looked into on the whole model."""
    task = partial(regression, staged, batch_size=6, split=squall.Pipeline(microbatches=3))
    strategy = squall.AllReduce(replicas=2, optimizer=SGD)
    with pytest.raises(squall.NotFinite):
        squall.fit(task(train=NUMBERED, loss=poisoned), strategy, run_dir=run_dir, settings=replace(LOCAL, parts=2))
    found = squall.replay(run_dir, around_nan=True).nan
    assert found is not None
    assert 40 in epoch_order(0, 0, 90)[found.start : found.stop]
    assert found.parameters
    models = [squall.replay(run_dir, until=number) for number in (0, 1)]
    assert [replayed.versions for replayed in models] == [(0,), (1,)]
    assert not same(models[0].model, models[1].model)
