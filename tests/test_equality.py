"""One replica of any strategy is plain training; lock-step replicas are that on the union of their batches."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR

import squall
from squall.run import Run
from squall.task import TaskFunction
from tests import deep
from tests.tasks import LOCAL, Noisy, assert_same, by_hand, difference, plain, regression, snapshot

Fit = Callable[..., Run]

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.05)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
OPTIMIZERS = {"sgd": SGD, "adagrad": ADAGRAD, "adamw": ADAMW}


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 1))


def two_rates(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": rest, "lr": 0.2, "weight_decay": 0.0}, {"params": weights}]


def warm_up_then_cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    rising = LambdaLR(optimizer, lambda step: (step + 1) / 4)
    return SequentialLR(optimizer, [rising, CosineAnnealingLR(optimizer, 20)], [4])


TASKS: dict[str, TaskFunction] = {
    "plain": regression(),
    "dropout and BatchNorm": regression(normalized),
    "random augmentation": regression(train=Noisy(90)),
    "groups": regression(groups=two_rates),
    "schedule": regression(schedule=warm_up_then_cosine),
    "clipped": regression(clip_norm=0.1),
    "unshuffled": regression(shuffle=False),
    "all at once": regression(
        normalized, train=Noisy(90), groups=two_rates, schedule=warm_up_then_cosine, clip_norm=0.2
    ),
}


def one_replica(strategy: str, shards: int, optimizer: Any) -> squall.Strategy:
    kind = {"downpour": squall.Downpour, "synchronous": squall.Synchronous}[strategy]
    return kind(replicas=1, shards=shards, optimizer=optimizer)


@pytest.mark.parametrize(
    ("optimizer", "strategy", "shards"),
    deep.sweep(list(product(OPTIMIZERS, ("downpour", "synchronous"), (1, 3))), 6),
)
def test_one_replica_is_the_sequential_reference_bit_for_bit_with_any_optimizer(
    inline: Fit, optimizer: str, strategy: str, shards: int
) -> None:
    task, chosen = TASKS["all at once"], OPTIMIZERS[optimizer]
    reference = inline(task, squall.SingleProcess(optimizer=chosen), epochs=2, seed=3)
    assert_same(inline(task, one_replica(strategy, shards, chosen), epochs=2, seed=3), reference, task)


@pytest.mark.parametrize("strategy", ["downpour", "synchronous"])
@pytest.mark.parametrize("name", TASKS)
def test_one_replica_is_the_sequential_reference_bit_for_bit_on_any_task(inline: Fit, name: str, strategy: str) -> None:
    task = TASKS[name]
    reference = inline(task, squall.SingleProcess(optimizer=SGD), epochs=2)
    assert_same(inline(task, one_replica(strategy, 3, SGD), epochs=2), reference, task)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["plain", "groups", "schedule", "clipped", "unshuffled"])
def test_the_reference_is_the_loop_that_a_person_would_write(inline: Fit, name: str, optimizer: str) -> None:
    task, chosen = TASKS[name], OPTIMIZERS[optimizer]
    run = inline(task, squall.SingleProcess(optimizer=chosen), epochs=3, seed=5)
    assert difference(run.model, by_hand(task, chosen, epochs=3, seed=5)) < 1e-6


def test_training_moves_every_parameter(inline: Fit) -> None:
    """Equal runs would also be equal if nothing were trained."""
    torch.manual_seed(0)
    untrained = plain()
    trained = inline(TASKS["plain"], squall.Downpour(replicas=1, optimizer=SGD)).model
    for before, after in zip(untrained.parameters(), trained.parameters()):
        assert (before != after).any()


@pytest.mark.parametrize("shards", deep.sweep([2, 1], 1))
@pytest.mark.parametrize(
    ("optimizer", "examples"),  # of 24 in a round: none left, 18, 2, 14
    deep.sweep(list(product(OPTIMIZERS, (96, 90, 98, 110))), 5),
)
def test_three_synchronous_replicas_are_one_process_with_the_union_of_their_batches(
    inline: Fit, optimizer: str, examples: int, shards: int
) -> None:
    chosen = OPTIMIZERS[optimizer]
    strategy = squall.Synchronous(replicas=3, shards=shards, optimizer=chosen)
    union = inline(regression(examples=examples, batch_size=8), strategy, epochs=2)
    one = inline(regression(examples=examples, batch_size=24), squall.SingleProcess(optimizer=chosen), epochs=2)
    assert union.summary().updates == one.summary().updates
    assert difference(union.model, one.model) < 2e-5


def test_synchronous_processes_are_one_process_and_reproducible(run_dir: Path, inline: Fit) -> None:
    task, strategy = regression(examples=110, batch_size=8), squall.Synchronous(replicas=3, shards=2, optimizer=ADAMW)
    first, second = (
        squall.fit(task, strategy, epochs=2, settings=LOCAL, run_dir=run_dir.with_name(name)) for name in ("a", "b")
    )
    assert_same(first, second, task)
    assert_same(first, inline(task, strategy, epochs=2), task)
    union = inline(regression(examples=110, batch_size=24), squall.SingleProcess(optimizer=ADAMW), epochs=2)
    assert difference(first.model, union.model) < 2e-5


def test_one_replica_in_processes_is_the_sequential_reference(run_dir: Path, inline: Fit) -> None:
    task = TASKS["all at once"]
    reference = inline(task, squall.SingleProcess(optimizer=ADAMW), epochs=2)
    strategy = squall.Downpour(replicas=1, shards=3, optimizer=ADAMW)
    assert_same(squall.fit(task, strategy, epochs=2, settings=LOCAL, run_dir=run_dir), reference, task)


@pytest.mark.parametrize(
    "strategy",
    [
        squall.Downpour(replicas=3, shards=2, optimizer=ADAGRAD, push_every=2, fetch_every=3, overlap=True),
        squall.Downpour(replicas=3, shards=2, optimizer=ADAGRAD, max_delay=1, warm_start=32),
        squall.Synchronous(replicas=3, shards=2, optimizer=ADAGRAD),
    ],
    ids=["overlap", "bounded", "synchronous"],
)
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(inline: Fit, strategy: squall.Strategy) -> None:
    task = TASKS["all at once"]
    first, second, other = (inline(task, strategy, epochs=2, seed=seed) for seed in (7, 7, 8))
    assert_same(first, second, task)
    assert not torch.equal(snapshot(first, task).tensors["weights"], snapshot(other, task).tensors["weights"])


PROGRAM = """
import hashlib, sys, torch, squall
from squall.run import Run
from tests.tasks import INLINE, regression, snapshot
Run.report = lambda run: None
task = regression()
run = squall.fit(task, squall.Downpour(replicas=3, shards=2), epochs=2, settings=INLINE, run_dir=sys.argv[1])
print(hashlib.sha256(snapshot(run, task).tensors["weights"].numpy().tobytes()).hexdigest())
"""


def test_the_weights_do_not_depend_on_the_order_of_sets(tmp_path: Path, inline: Fit) -> None:
    found = []
    for number in deep.sweep(("1", "2"), 1):  # and here it is another one
        environment = {**os.environ, "PYTHONHASHSEED": number}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / number)],
            env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True,
        )  # fmt: skip
        found.append(done.stdout.strip())
    task = regression()
    here = snapshot(inline(task, squall.Downpour(replicas=3, shards=2), epochs=2), task).tensors["weights"]
    assert found == [hashlib.sha256(here.numpy().tobytes()).hexdigest()] * len(found)
