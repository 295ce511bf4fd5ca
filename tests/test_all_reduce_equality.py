"""All-reduce makes the updates that lock-step training on shards makes, or one process on the union of the batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import squall
from squall.run import Run
from squall.task import TaskFunction
from tests import deep
from tests.runtime.test_models import Counted, Switch, Tied
from tests.tasks import LOCAL, assert_same, difference, mean_square, regression
from tests.test_equality import two_rates, warm_up_then_cosine

Fit = Callable[..., Run]
OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}
SEVERAL = regression(examples=110, batch_size=8)  # 14 batches, so that in each epoch's fifth round one of 3 gets none
EPOCHS, STEPS, BATCHES = 10, 50, 140


class Convolutions(nn.Module):
    """What BatchNorm centres has no bias: its gradient would be rounding alone, of which AdamW makes whole steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()
        )
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        images = inputs[:, None, :, None] * inputs[:, None, None, :]
        return self.head(self.layers(images).mean((2, 3)))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.GELU(), nn.Dropout(0.2), nn.Linear(9, 1))


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))
    model[0].requires_grad_(False)
    return model


def next_word(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), (batch[0] + 1) % 12)


WORDS = TensorDataset(torch.randint(0, 12, (110,), generator=torch.Generator().manual_seed(0)))
several = partial(regression, examples=110, batch_size=8)
TASKS: dict[str, TaskFunction] = {
    "tied weights": several(Tied, train=WORDS, loss=next_word),
    "frozen parameters": several(frozen),
    "LayerNorm and dropout": several(normalized),
    "convolutions and BatchNorm": several(Convolutions),
    "two groups": several(groups=two_rates),
    "schedule": several(schedule=warm_up_then_cosine),
    "parameters that some batches do not use": several(Switch),
    "bfloat16": several(autocast=torch.bfloat16),
}


class TiedAround(Tied):
    """With layers between the embedding and the head, so that three replicas have a tensor each."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Sequential(nn.Linear(5, 5), nn.Tanh())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.between(self.embedding(inputs)))


def frozen_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 1))
    model[0].requires_grad_(False)
    return model


ENOUGH_TENSORS = TASKS | {
    "tied weights": several(TiedAround, train=WORDS, loss=next_word),
    "frozen parameters": several(frozen_first),
}


@pytest.mark.parametrize(("name", "optimizer"), deep.sweep(list(product(TASKS, OPTIMIZERS)), 6))
def test_all_reduce_is_synchronous_on_any_task(inline: Fit, name: str, optimizer: str) -> None:
    task, chosen = TASKS[name], OPTIMIZERS[optimizer]
    reduced = inline(task, squall.AllReduce(replicas=3, optimizer=chosen), epochs=EPOCHS)
    sharded = inline(task, squall.Synchronous(replicas=3, shards=2, optimizer=chosen), epochs=EPOCHS)
    assert reduced.summary().updates == sharded.summary().updates == STEPS
    assert reduced.summary().examples == sharded.summary().examples == 110 * EPOCHS
    assert difference(reduced.model, sharded.model) < 1e-6


@pytest.mark.parametrize(("name", "optimizer"), deep.sweep(list(product(ENOUGH_TENSORS, OPTIMIZERS)), 6))
def test_members_with_shares_of_the_optimizer_make_the_same_updates(inline: Fit, name: str, optimizer: str) -> None:
    reduced = squall.AllReduce(replicas=3, optimizer=OPTIMIZERS[optimizer])
    runs = [
        inline(ENOUGH_TENSORS[name], dataclasses.replace(reduced, shard_optimizer=shares), epochs=EPOCHS)
        for shares in (False, True)
    ]
    assert_same(*runs, ENOUGH_TENSORS[name])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_replica_is_one_process(inline: Fit, optimizer: str) -> None:
    """Not bit for bit: torch's kernels round the ends of tensors otherwise, and shards cut them elsewhere."""
    task = several(Convolutions, groups=two_rates, schedule=warm_up_then_cosine, clip_norm=0.2)
    reference = inline(task, squall.SingleProcess(optimizer=OPTIMIZERS[optimizer]), epochs=2)
    reduced = inline(task, squall.AllReduce(replicas=1, optimizer=OPTIMIZERS[optimizer]), epochs=2)
    assert difference(reduced.model, reference.model) < 1e-6


def test_the_mean_gradient_is_clipped_as_that_of_one_process_is(inline: Fit) -> None:
    chosen = OPTIMIZERS["momentum"]
    union = inline(several(clip_norm=0.05), squall.AllReduce(replicas=3, optimizer=chosen), epochs=EPOCHS)
    one = inline(
        regression(examples=110, batch_size=24, clip_norm=0.05), squall.SingleProcess(optimizer=chosen), epochs=EPOCHS
    )
    assert difference(union.model, one.model) < 2e-5


def test_counts_of_batches_and_buffers_that_a_model_replaces_come_back(inline: Fit) -> None:
    run = inline(regression(Counted, examples=96), squall.AllReduce(replicas=3), epochs=4)
    assert run.model.seen.item() == 24 / 3
    assert run.model.begun.item() is True


@pytest.mark.usefixtures("without_report")
@pytest.mark.parametrize(
    ("name", "optimizer"),
    deep.sweep([("two groups", "AdamW"), ("schedule", "AdamW"), ("convolutions and BatchNorm", "momentum")], 1),
)
def test_all_reduce_in_processes_is_synchronous(run_dir: Path, inline: Fit, name: str, optimizer: str) -> None:
    task, chosen = TASKS[name], OPTIMIZERS[optimizer]
    strategy = squall.AllReduce(replicas=3, optimizer=chosen)
    run = squall.fit(task, strategy, epochs=EPOCHS, settings=LOCAL, run_dir=run_dir)
    sharded = inline(task, squall.Synchronous(replicas=3, shards=2, optimizer=chosen), epochs=EPOCHS)
    assert run.summary().updates == STEPS
    assert difference(run.model, sharded.model) < 1e-6


@pytest.mark.usefixtures("without_report")
def test_shares_of_the_optimizer_in_processes_make_the_same_updates(run_dir: Path, tmp_path: Path) -> None:
    task = several(Convolutions, schedule=warm_up_then_cosine)
    whole = squall.AllReduce(replicas=3, optimizer=OPTIMIZERS["AdamW"])
    runs = [
        squall.fit(task, strategy, epochs=2, settings=LOCAL, run_dir=directory)
        for strategy, directory in (
            (whole, run_dir), (dataclasses.replace(whole, shard_optimizer=True), tmp_path / "shares"),
        )
    ]  # fmt: skip
    assert_same(*runs, task)


@pytest.mark.usefixtures("without_report")
def test_torch_is_told_once_that_a_batch_does_not_use_all_parameters(
    run_dir: Path, tmp_path: Path, inline: Fit
) -> None:
    calls = tmp_path / "calls"

    def counted(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        if Path("/proc/self/cmdline").read_bytes().startswith(b"squall replica "):  # and not where tasks are checked
            with calls.open("a") as file:
                file.write(".")
        return mean_square(model, batch)

    strategy = squall.AllReduce(replicas=3, optimizer=OPTIMIZERS["momentum"])
    run = squall.fit(several(Switch, loss=counted), strategy, epochs=EPOCHS, settings=LOCAL, run_dir=run_dir)
    assert BATCHES < calls.stat().st_size <= BATCHES + 3, "a group that forms anew repeats one step"
    sharded = inline(several(Switch), squall.Synchronous(replicas=3, optimizer=strategy.optimizer), epochs=EPOCHS)
    assert difference(run.model, sharded.model) < 1e-6
