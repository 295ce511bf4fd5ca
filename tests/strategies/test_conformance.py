"""What every strategy must do, one row a strategy, one test a column.

Two columns lie elsewhere: staleness within its bound at every apply (tests/sim/test_runs.py), and a replica killed at
every event (tests/sim/test_kills.py) and for real (tests/launchers/test_failures.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import squall
from squall.optim import Proximal
from squall.report import Reader
from squall.run import Run
from squall.runtime.optimizers import in_words
from squall.strategies import STRATEGIES, Strategy
from squall.usercode.task_file import load_task
from squall.vector import Layout
from tests import deep
from tests.strategies.references import averaged, block_descent, elastic, local_training, outer
from tests.tasks import INLINE, by_hand, regression, snapshot

Fit = Callable[..., Run]
SGD = partial(torch.optim.SGD, lr=0.05)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01)
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
ELASTIC_NET = partial(Proximal, inner=MOMENTUM, l1=1e-4, l2=1e-3)
EPOCHS = 3


class Row(NamedTuple):
    """A strategy with three replicas, and what it is with one."""

    strategy: Strategy
    reference: Callable[[], Tensor]  # the parameters after EPOCHS of `regression()`


def plain(optimizer: Any) -> Callable[[], Tensor]:
    return lambda: nn.utils.parameters_to_vector(by_hand(regression(), optimizer, epochs=EPOCHS).parameters()).detach()


def in_turns(optimizer: Any) -> Callable[[], Tensor]:
    return lambda: block_descent(regression(), optimizer, 3, EPOCHS)


def local(optimizer: Any, every: int, exchange: Any) -> Callable[[], Tensor]:
    return lambda: local_training(regression(), optimizer, every, exchange, EPOCHS)


TABLE: dict[str, Row] = {
    "synchronous": Row(squall.Synchronous(optimizer=MOMENTUM), plain(MOMENTUM)),
    "all-reduce": Row(squall.AllReduce(optimizer=MOMENTUM), plain(MOMENTUM)),
    "backup, drop": Row(squall.Synchronous(backup=1, optimizer=SGD), plain(SGD)),
    "backup, fold": Row(squall.Synchronous(backup=1, late="fold", optimizer=SGD), plain(SGD)),
    "bounded delay": Row(squall.BoundedDelay(max_delay=2, optimizer=MOMENTUM), plain(MOMENTUM)),
    "downpour": Row(squall.Downpour(optimizer=partial(torch.optim.Adagrad, lr=0.05)),
                    plain(partial(torch.optim.Adagrad, lr=0.05))),
    "scaled": Row(squall.AsynchronousSGD(optimizer=SGD), plain(SGD)),
    "compensated": Row(squall.AsynchronousSGD(staleness="compensate", optimizer=SGD), plain(SGD)),
    "adaptively compensated": Row(
        squall.AsynchronousSGD(staleness="compensate", compensation=0.1, adaptive=0.95, optimizer=SGD), plain(SGD)),
    "delayed proximal": Row(squall.DelayedProximal(l1=1e-4, l2=1e-3, optimizer=MOMENTUM), plain(ELASTIC_NET)),
    "delayed proximal, blocks": Row(squall.DelayedProximal(blocks=3, order="random", optimizer=SGD), in_turns(SGD)),
    "averaging": Row(squall.Averaging(optimizer=MOMENTUM, every=4), local(MOMENTUM, 4, averaged)),
    "elastic averaging": Row(squall.ElasticAveraging(optimizer=SGD, every=4), local(SGD, 4, elastic(0.9))),
    "elastic averaging, momentum": Row(
        squall.ElasticAveraging(optimizer=MOMENTUM, every=4, moving_rate=0.5), local(MOMENTUM, 4, elastic(0.5))),
    "diloco": Row(squall.DiLoCo(optimizer=ADAMW, inner_steps=5), local(ADAMW, 5, outer(NESTEROV))),
    "asynchronous diloco": Row(
        squall.DiLoCo(optimizer=ADAMW, inner_steps=5, form="asynchronous"),
        local(ADAMW, 5, outer(NESTEROV, prorated=False))),
    "matched diloco": Row(
        squall.DiLoCo(optimizer=ADAMW, inner_steps=5, form="asynchronous", matched=True),
        local(ADAMW, 5, outer(NESTEROV, prorated=False))),
    "decoupled diloco": Row(
        squall.DiLoCo(optimizer=ADAMW, inner_steps=5, form="decoupled"), local(ADAMW, 5, outer(NESTEROV))),
}  # fmt: skip


def of(name: str, **changes: Any) -> Strategy:
    strategy: Any = TABLE[name].strategy
    if changes.get("replicas") == 1 and getattr(strategy, "backup", 0):
        changes["backup"] = 0
    if (shards := strategy.recipe().shards) > 0:
        shards = 2 if strategy.recipe().loop.exchanges.rules.waits_for_all else 1
        changes = {"shards": shards} | changes
    changed: Strategy = dataclasses.replace(strategy, **({"replicas": 3} | changes))
    return changed


def test_the_table_has_a_row_for_every_strategy() -> None:
    kinds = {type(row.strategy) for row in TABLE.values()}
    others = {squall.SingleProcess, squall.Sandblaster}  # the reference; test_sandblaster.py
    assert kinds == set(STRATEGIES.values()) - others


@pytest.mark.parametrize("name", TABLE)
def test_one_replica_is_the_sequential_reference(inline: Fit, name: str) -> None:
    run = inline(regression(), of(name, replicas=1), epochs=EPOCHS)
    found, expected = nn.utils.parameters_to_vector(run.model.parameters()).detach(), TABLE[name].reference()
    assert (found - expected).norm() / expected.norm() < 2e-6


# ---------------------------------------------------------------- convergence


def quadratic() -> squall.Task:
    """w that minimizes the mean of |w - x|^2 over the examples: their mean."""
    points = torch.randn(256, 8, generator=torch.Generator().manual_seed(4)) + torch.arange(8.0)
    return squall.Task(
        model=Point(), loss=lambda model, batch: ((model.w - batch[0]) ** 2).sum(1).mean(),
        train=TensorDataset(points), batch_size=16,
    )  # fmt: skip


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8))


@pytest.mark.parametrize("name", TABLE)
def test_three_replicas_find_the_minimum_of_a_quadratic(inline: Fit, name: str) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.03)
    if name == "downpour":
        optimizer = partial(torch.optim.Adagrad, lr=1.0)  # type: ignore[assignment]
    run = inline(quadratic, of(name, optimizer=optimizer), epochs=40)
    target = quadratic().train.tensors[0].mean(0)  # type: ignore[attr-defined]
    assert (run.model.w - target).norm() < 0.1 * target.norm()


@pytest.mark.parametrize("name", deep.sweep(list(TABLE), 1))
def test_three_replicas_learn_the_digits(inline: Fit, name: str) -> None:
    pytest.importorskip("sklearn")
    strategy = of(name)
    optimizer: Any = partial(torch.optim.SGD, lr=0.1)
    if name == "downpour":
        optimizer = partial(torch.optim.Adagrad, lr=0.02)
    run = inline(digits, dataclasses.replace(strategy, optimizer=optimizer), epochs=20)  # type: ignore[type-var]
    assert run.summary().metrics["accuracy"] > 0.93


def digits() -> squall.Task:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]

    pixels, labels = load_digits(return_X_y=True)
    inputs, targets = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs[order][:1400], targets[order][:1400])
    held_out = TensorDataset(inputs[order][1400:], targets[order][1400:])
    return squall.Task(
        model=nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        train=data, validate=held_out, batch_size=16,
        metrics={"accuracy": lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).float()},
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:the model has Dropout")  # which a line search compares losses of
@pytest.mark.parametrize("name", deep.sweep(list(STRATEGIES), 1))
@deep.only
def test_defaults_learn_the_digits_in_ten_epochs(inline: Fit, name: str) -> None:
    pytest.importorskip("sklearn")
    task = load_task(str(Path(__file__).parents[2] / "examples" / "digits.py")).function
    summary = inline(task, STRATEGIES[name](), epochs=10).summary()
    assert summary.metrics["accuracy"] > 0.93
    assert summary.optimizer == in_words(STRATEGIES[name]().recipe())


def test_averaging_and_diloco_move_one_kth_of_the_bytes(inline: Fit) -> None:
    def exchanged(strategy: Strategy) -> int:
        return inline(regression(examples=96 * 8), strategy, epochs=2).summary().exchanged_bytes

    whole = exchanged(squall.Synchronous(replicas=3))
    model = regression()().model
    assert whole == 96 * 2 * 4 * Layout.of(model, [list(model.parameters())]).length
    assert 0 < exchanged(squall.Averaging(replicas=3, every=8)) <= whole / 8
    assert 0 < exchanged(squall.DiLoCo(replicas=3, inner_steps=16)) <= whole / 16
    assert exchanged(squall.SingleProcess()) == 0


@deep.only
def test_matched_inner_steps_let_a_slow_replica_push_as_often(inline: Fit) -> None:
    """At a third of the speed it does a third of the work in every push."""

    def pushes_and_batches(matched: bool) -> tuple[list[int], list[int]]:
        strategy = squall.DiLoCo(replicas=2, optimizer=ADAMW, inner_steps=9, form="asynchronous", matched=matched)
        settings = dataclasses.replace(INLINE, slow=1 / 3)
        run = inline(regression(examples=96 * 16), strategy, epochs=12, settings=settings)
        reader = Reader(run.directory / "run.sqlite")
        work = reader.progress()
        reader.close()
        return [row.pushed_bytes for row in work], [row.batches for row in work]

    pushes, batches = pushes_and_batches(matched=True)
    assert min(pushes) > 0.8 * max(pushes)
    assert min(batches) < 0.4 * max(batches)
    pushes, batches = pushes_and_batches(matched=False)
    assert min(pushes) < 0.4 * max(pushes)


# ---------------------------------------------------------------- the same trace


@pytest.mark.parametrize("name", deep.sweep(list(TABLE), 6))
def test_snapshot_and_resume_give_the_same_weights_every_time(inline: Fit, name: str, tmp_path: Path) -> None:
    task = regression()
    first = inline(task, of(name), epochs=2, run_dir=tmp_path / "first")
    found = []
    for copy in ("second", "third"):
        shutil.copytree(first.directory, tmp_path / copy)
        found.append(_digest(squall.resume(tmp_path / copy, epochs=4)))
    assert found[0] == found[1]
    assert found[0] != _digest(first)


def _digest(run: Run) -> str:
    weights = snapshot(run, regression()).tensors["weights"]
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


PROGRAM = """
import sys
from pathlib import Path
import squall
from squall.usercode.task_file import load_task
from squall.optim import Proximal
from squall.run import Run
from tests.tasks import INLINE, regression
from tests.strategies.test_conformance import TABLE, _digest, of
Run.report = lambda run: None
for number, name in enumerate(TABLE):
    run = squall.fit(regression(), of(name), epochs=2, settings=INLINE, run_dir=Path(sys.argv[1]) / str(number))
    print(_digest(run))
"""


@deep.only
def test_the_same_seed_gives_the_same_weights_whatever_the_order_of_sets(tmp_path: Path, inline: Fit) -> None:
    found = []
    for number in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": number}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / number)],
            env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True,
        )  # fmt: skip
        found.append(done.stdout.split())
    assert found[0] == found[1]
    assert len(set(found[0])) > len(TABLE) // 2, "they are different algorithms"
    here = [_digest(inline(regression(), of(name), epochs=2, settings=INLINE)) for name in TABLE]
    assert here == found[0]
