"""A batch that gives a NaN is not applied: it is tried once more, then the run stops and keeps what is good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import squall
from squall.record.rows import EventRow
from squall.report import Reader
from squall.run import Run
from squall.runtime.snapshot import Snapshots
from tests.tasks import mean_square, numbers, regression, snapshot

Fit = Callable[..., Run]
DOWNPOUR = squall.Downpour(replicas=2, shards=2, optimizer=partial(torch.optim.SGD, lr=0.05))


def poisoned(times: int, at: float = 40.0) -> tuple[Callable[[nn.Module, Any], Tensor], list[int]]:
    """A loss that is NaN for the batch with example 40, the first so many times."""
    seen = [0]

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        value = mean_square(model, batch)
        if model.training and (batch[2] == at).any() and (seen[0] < times):
            seen[0] += 1
            return value * float("nan")
        return value

    return loss, seen


def numbered() -> TensorDataset:
    return TensorDataset(*numbers(90).tensors, torch.arange(90))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def events(run_dir: Path, kind: str) -> list[str]:
    reader = Reader(run_dir / "run.sqlite")
    try:
        return [event.text for event in reader.rows(EventRow) if event.kind == kind]
    finally:
        reader.close()


STRATEGIES = {
    "single": squall.SingleProcess(),
    "downpour": DOWNPOUR,
    "summing": squall.Downpour(replicas=2, push_every=3, fetch_every=2, optimizer=DOWNPOUR.optimizer),
    "overlap": squall.Downpour(replicas=2, overlap=True, optimizer=DOWNPOUR.optimizer),
    "synchronous": squall.Synchronous(replicas=3, optimizer=DOWNPOUR.optimizer),
    "all-reduce": squall.AllReduce(replicas=3, optimizer=DOWNPOUR.optimizer),
    "averaging": squall.Averaging(replicas=2, every=4, optimizer=DOWNPOUR.optimizer),
    "elastic": squall.ElasticAveraging(replicas=2, every=4, optimizer=DOWNPOUR.optimizer),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
def test_a_batch_that_stays_nan_ends_the_run_with_its_name_and_the_weights_before_it(
    inline: Fit, strategy: squall.Strategy, run_dir: Path
) -> None:
    loss, seen = poisoned(times=1000)
    task = regression(normalized, train=numbered(), loss=loss)
    with pytest.raises(squall.NotFinite, match=r"examples \d+ to \d+ of epoch 0 \(lease \d+\)") as caught:
        inline(task, strategy, epochs=3, run_dir=run_dir)
    assert seen[0] in (2, 4), "it is tried once more; another replica may have met it in the next epoch meanwhile"
    assert len(events(run_dir, "nonfinite")) == seen[0], "all are counted"
    assert str(run_dir / "snapshots") in str(caught.value)
    assert Snapshots(run_dir).numbers()
    assert snapshot(Run(run_dir, task), task).tensors["weights"].isfinite().all()


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
def test_a_nan_that_goes_away_is_survived(inline: Fit, strategy: squall.Strategy, run_dir: Path) -> None:
    loss, seen = poisoned(times=1)
    task = regression(normalized, train=numbered(), loss=loss)
    run = inline(task, strategy, epochs=2, run_dir=run_dir)
    assert seen[0] == 1
    assert len(events(run_dir, "nonfinite")) == 1
    assert run.summary().examples == 180
    assert snapshot(run, task).tensors["weights"].isfinite().all()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_that_overflows_on_a_replica_never_reaches_the_others(inline: Fit, replicas: int, run_dir: Path) -> None:
    """The gradient is finite, and the weights after the replica's own step are not."""
    strategy = squall.Averaging(replicas=replicas, every=4, optimizer=partial(torch.optim.SGD, lr=1e38))
    task = regression(train=numbered())
    with pytest.raises(squall.NotFinite):
        inline(task, strategy, epochs=3, run_dir=run_dir)
    weights = snapshot(Run(run_dir, task), task).tensors["weights"]
    assert weights.isfinite().all()
    assert weights.abs().max() < 1e6


def test_bad_numbers_in_the_data_do_not_get_into_the_statistics(inline: Fit) -> None:
    """BatchNorm's forward has averaged the NaN by the time that the loss shows it; the retry begins afresh."""
    bad = [True]

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        inputs = batch[0]
        if (batch[2] == 40).any() and model.training and torch.is_grad_enabled() and bad[0]:
            bad[0] = False
            inputs = inputs * float("nan")
        return mean_square(model, [inputs, batch[1]])

    for strategy in STRATEGIES.values():
        bad[0] = True
        model = inline(regression(normalized, train=numbered(), loss=loss), strategy, epochs=1).model
        assert model[1].running_mean.isfinite().all(), strategy
