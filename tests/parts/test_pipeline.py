"""A pipeline's updates are those of plain PyTorch on the same microbatches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import squall
from tests.parts.replica import apart, plain, replica, train
from tests.tasks import mean_square, numbers


def sequential() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def task(model: nn.Module, split: squall.Pipeline, **options: object) -> squall.Task:
    options = {"loss": mean_square, "train": numbers(90), "batch_size": 16, "split": split} | options
    return squall.Task(model=model, **options)  # type: ignore[arg-type]


def test_fifty_steps_with_momentum_are_those_of_plain_pytorch() -> None:
    """90 examples in batches of 16: the last of an epoch has two microbatches of 4 and one of 2."""
    split = squall.Pipeline(microbatches=4)
    ours = replica(task(sequential(), split), 2, train(), starts=(0, 2))
    theirs = plain(task(sequential(), split), 4)
    assert apart(ours.vector, theirs.vector) < 1e-6
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
