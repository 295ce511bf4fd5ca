"""Small tasks that several test files train, and what they compare of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import squall
from squall.run import Run
from squall.runtime.seeds import epoch_order
from squall.runtime.snapshot import Restored, Snapshots
from squall.task import TaskFunction
from squall.vector import Layout

INLINE = squall.Settings(launcher="inline", threads=1, progress=False)
LOCAL = squall.Settings(threads=1, progress=False)


def numbers(examples: int, features: int = 6) -> TensorDataset:
    """Inputs [examples, features] and a target [examples, 1] that depends on them. Rule: torch.Generator, seed 1."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(examples, features, generator=generator)
    return TensorDataset(inputs, inputs[:, :2].sum(1, keepdim=True).sin())


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))


def mean_square(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def regression(
    model: Callable[[], nn.Module] = plain, *, examples: int = 90, batch_size: int = 16,
    train: Dataset[Any] | None = None, **options: Any,
) -> TaskFunction:  # fmt: skip
    """A task function; 90 examples in batches of 16 leave a short last one."""
    data = numbers(examples) if train is None else train
    options = {"loss": mean_square, "train": data, "batch_size": batch_size} | options
    return lambda: squall.Task(model=model(), **options)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """`numbers`, each item with random noise from torch, NumPy and `random`, as augmentation would draw it."""

    def __init__(self, examples: int) -> None:
        self.inputs, self.targets = numbers(examples).tensors

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        import random

        import numpy as np

        noise = torch.rand(6) + float(np.random.rand()) + random.random()
        return self.inputs[index] + 0.1 * noise, self.targets[index]


def snapshot(run: Run, task: TaskFunction) -> Restored:
    """The run's last snapshot, put together."""
    built = task()
    layout = Layout.of(built.model, [group["params"] for group in built.param_groups()])
    snapshots = Snapshots(run.directory)
    return snapshots.restore(snapshots.numbers()[-1], layout)


def assert_same(first: Run, second: Run, task: TaskFunction) -> None:
    """Weights and buffers, of the snapshots and of the models, are the same bits."""
    assert torch.equal(snapshot(first, task).tensors["weights"], snapshot(second, task).tensors["weights"])
    mine, theirs = first.model.state_dict(), second.model.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def difference(first: nn.Module, second: nn.Module) -> float:
    """Between two models' states, in the 2-norm, relative to the second's."""
    mine, theirs = (
        torch.cat([tensor.flatten().double() for tensor in model.state_dict().values()]) for model in (first, second)
    )
    return float((mine - theirs).norm() / theirs.norm())


def by_hand(
    task: TaskFunction, optimizer: Callable[..., torch.optim.Optimizer], *, epochs: int, seed: int = 0
) -> nn.Module:
    """Plain PyTorch: the loop that a person would write."""
    torch.manual_seed(seed)
    built = task()
    model, data = built.model, built.train
    groups = built.groups(model) if built.groups is not None else list(model.parameters())
    optimizer_ = optimizer(groups)
    schedule = built.schedule(optimizer_) if built.schedule is not None else None
    model.train()
    for epoch in range(epochs):
        order = epoch_order(seed, epoch, len(data), built.shuffle)  # type: ignore[arg-type]
        for indices in order.split(built.batch_size):
            batch = torch.utils.data.default_collate([data[i] for i in indices.tolist()])
            optimizer_.zero_grad()
            built.loss(model, batch).backward()
            if built.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), built.clip_norm)
            optimizer_.step()
            if schedule is not None:
                schedule.step()
    return model.eval()
