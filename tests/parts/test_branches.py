"""Branches on parts of their own update the whole model as plain PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import squall
from squall.parts.check import check_split
from squall.protocol.effects import End, UseWeights
from squall.runtime.driver import Host
from squall.runtime.job import Job
from tests import deep
from tests.parts.replica import apart, compute, plain, replica, train
from tests.tasks import mean_square, numbers


class Columns(nn.Module):
    """Convolutions in columns that cross at the second layer, with BatchNorm in one and a layer before and behind."""

    def __init__(self, columns: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 3, padding=1)
        for number in range(columns):
            front = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3) if number == 1 else nn.Identity(), nn.ReLU())
            back = nn.Sequential(nn.Conv2d(3 * columns, 2, 3), nn.ReLU(), nn.Flatten())
            self.add_module(f"column{number}", nn.ModuleList([front, back]))
        self.columns: list[nn.ModuleList] = [self.get_submodule(f"column{i}") for i in range(columns)]  # type: ignore[misc]
        self.head = nn.Linear(32 * columns, 5)

    def forward(self, images: Tensor) -> Tensor:
        stem = self.stem(images)
        crossing = torch.cat([column[0](stem) for column in self.columns], 1)
        return self.head(torch.cat([column[1](crossing) for column in self.columns], 1))


class Frozen(nn.Module):
    """A branch that learns nothing, one that takes two inputs, and one whose result is the next one's input."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(6, 4)
        self.left, self.right = nn.Linear(4, 3).requires_grad_(False), nn.Bilinear(4, 6, 3)
        self.behind = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.head = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.front(inputs).tanh()
        left, right = self.left(hidden), self.right(hidden, inputs)
        behind = self.behind[1](self.behind[0](right))
        behind += left * right.tanh()
        return self.head(behind)


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(90, 1, 8, 8, generator=generator), torch.arange(90) % 5)


def entropy(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch[0])
    return cross_entropy(logits, batch[1]), {"right": (logits.argmax(1) == batch[1]).float().mean()}


def task(model: Callable[[], nn.Module], *names: str, **options: Any) -> squall.Task:
    torch.manual_seed(3)
    options = {"loss": mean_square, "train": numbers(90), "batch_size": 16} | options
    return squall.Task(model=model(), split=squall.Branches(*names), **options)


@pytest.mark.parametrize(
    ("model", "names", "options"),
    [
        pytest.param(Columns, ("column0", "column1"), {"loss": entropy, "train": images()}, marks=deep.only),
        (Columns, ("column0", "column1"), {"loss": entropy, "train": images(), "clip_norm": 0.5}),
        pytest.param(
            lambda: Columns(3), ("column0", "column1", "column2"), {"loss": entropy, "train": images()}, marks=deep.only
        ),
        (Frozen, ("left", "right", "behind"), {}),
        pytest.param(Frozen, ("right", "left"), {}, marks=deep.only),
    ],
)
def test_fifty_steps_with_momentum_are_those_of_plain_pytorch(model: Any, names: Any, options: Any) -> None:
    check_split(task(model, *names, **options), len(names))
    ours = replica(task(model, *names, **options), len(names), train(lr=0.02))
    theirs = plain(task(model, *names, **options), 1, lr=0.02)
    assert apart(ours.vector, theirs.vector) < 1e-5
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-3)
    assert ours.extras == [pytest.approx(each, rel=1e-3) if each else None for each in theirs.extras]


class Dropping(nn.Module):
    """What has been dropped shows in the gradients: in each branch, and in what they share."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(Scale(), nn.Dropout(0.5))
        self.right = nn.Sequential(Scale(), nn.Dropout(0.5))
        self.joined, self.dropout = Scale(), nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        left, right = self.left(inputs), self.right(inputs)
        return left + right + self.dropout(self.joined(inputs))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(12))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.by * inputs


def test_branches_drop_by_themselves_and_what_they_share_drops_alike() -> None:
    """Were it dropped otherwise on the second part, its loss would be another one."""

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        output = model(batch[0])
        return output.sum(), {"drawn": torch.rand(())}

    def script(host: Host, job: Job) -> Any:
        found = []
        host.perform(UseWeights(0), 0.0)
        for number in (0, 1, 0):
            event = host.perform(compute(job.task, number), 0.0)
            gradient = job.arena.gradient(0, 0)
            found.append([*(view.clone() for view in job.layout.views(gradient)), event.extras["drawn"], event.loss])  # type: ignore[union-attr,index]
        host.perform(End("finished"), 0.0)
        return found

    data = TensorDataset(torch.ones(2, 12))
    first, second, again = replica(task(Dropping, "left", "right", loss=loss, train=data, batch_size=1), 2, script)
    drops = [tuple(view.tolist()) for found in (first, second) for view in found[:3]]
    assert len(set(drops)) == 6
    assert [tuple(view.tolist()) for view in again[:3]] == drops[:3]
    assert sum(view.sum().item() for view in first[:3]) == pytest.approx(first[4])


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.idle = Pair(), nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.left(inputs)[0] + self.right(inputs)


class Pair(nn.Module):
    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, inputs


def tied() -> nn.Module:
    model = Frozen()
    model.behind[1].weight = model.behind[0].weight
    return model


@pytest.mark.parametrize(
    ("model", "names", "parts", "words"),
    [
        (Frozen, ("left", "rite"), 2, "'rite' names no submodule of the model, which has front, left, right"),
        (Frozen, ("left", "right"), 3, "names 2 branches, and parts is 3: .* parts=2"),
        (Wrapped, ("left", "right"), 2, "left returns tuple: have it return one tensor"),
        (Wrapped, ("right", "idle"), 2, "the model never calls idle"),
        (tied, ("behind.0", "behind.1"), 2, r"behind.0.weight belongs to behind.1 and to behind.0 of the model: untie"),
    ],
)
def test_what_cannot_be_branches(model: Any, names: Any, parts: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_split(task(model, *names), parts)
