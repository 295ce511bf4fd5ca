"""How many threads a shard takes, and that no bit of what it computes depends on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import squall
from squall.plan import make_plan
from squall.runtime.hosts import ELEMENTS_OF_A_THREAD, shard_threads
from squall.runtime.job import Job, private_job
from squall.runtime.optimizers import build_optimizer
from squall.vector import Layout
from tests.tasks import regression

LARGE = 4 * ELEMENTS_OF_A_THREAD


def job(strategy: squall.Strategy, elements: int = LARGE, threads: int = 1) -> Job:
    """Of a vector of about so many elements."""
    settings = squall.Settings(threads=threads, progress=False)
    plan = make_plan(strategy, settings, epochs=1, steps=None, until=None, seed=0, device="cpu")
    task = regression(lambda: nn.Linear(6, 1))()
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    made = private_job(plan, strategy, task, layout, Path(), 0.0)
    return dataclasses.replace(made, layout=msgspec.structs.replace(layout, length=elements))


@pytest.mark.parametrize(
    ("strategy", "cores", "threads", "found"),
    [
        (squall.Downpour(replicas=1), 2, 1, 2),  # the only replica waits
        (squall.Downpour(replicas=1), 2, 2, 2),
        (squall.Downpour(replicas=2), 2, 1, 1),  # the other one computes
        (squall.Downpour(replicas=2), 8, 1, 4),  # no more than the vector is worth
        (squall.Downpour(replicas=2, shards=2), 8, 1, 2),
        (squall.Downpour(replicas=2, shards=2), 4, 1, 1),  # three cores for two shards
        (squall.Downpour(replicas=1, overlap=True), 2, 1, 1),
        (squall.Downpour(replicas=4), 2, 1, 1),
        (squall.Synchronous(replicas=2), 2, 1, 2),  # all wait
        (squall.Sandblaster(replicas=1), 8, 1, 1),  # sums depend on the number of threads
        (squall.DelayedProximal(replicas=1, group=0.1), 8, 1, 1),
    ],
)
def test_a_shard_takes_the_cores_that_replicas_leave_idle_while_it_works(
    strategy: squall.Strategy, cores: int, threads: int, found: int
) -> None:
    assert shard_threads(job(strategy, threads=threads), cores) == found
    assert shard_threads(job(strategy, elements=100_000, threads=threads), cores) == 1


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "factory",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        partial(torch.optim.Adagrad, lr=0.1),
        partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
        partial(torch.optim.RMSprop, lr=0.1, centered=True, momentum=0.9),
    ],
)
def test_an_update_has_the_same_bits_with_any_number_of_threads(
    factory: Callable[..., Optimizer], threads: Callable[[int], None]
) -> None:
    chance = torch.Generator().manual_seed(1)
    initial = torch.randn(LARGE + 13, generator=chance)
    gradients = torch.randn(3, LARGE + 13, generator=chance)
    found = []
    for number in (1, 2, 3):
        threads(number)
        weights = nn.Parameter(initial.clone())
        optimizer = build_optimizer(factory, [{"params": [weights]}])
        for gradient in gradients:
            weights.grad = gradient.clone()
            optimizer.step()
        found.append(weights.detach())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
