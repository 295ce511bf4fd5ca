"""What is wrong with a task is said before anything is launched, with the remedy, and without touching the task."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import squall
from squall.task import check_task
from tests.tasks import Noisy, mean_square, numbers, plain, regression


def frozen() -> nn.Module:
    model = plain()
    return model.requires_grad_(False)


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        return iter(numbers(20))


def twice(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters}, {"params": parameters[:1]}]


def strangers(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [nn.Parameter(torch.ones(2))]}]


def per_example(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().squeeze(1)


def number_loss(model: nn.Module, batch: Sequence[Tensor]) -> Any:
    return mean_square(model, batch).item()


def constant(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return batch[0].mean()


WRONG = {
    "empty train": ({"train": TensorDataset(torch.empty(0, 6))}, "Task.train is empty"),
    "empty validate": ({"validate": TensorDataset(torch.empty(0, 6))}, "Task.validate is empty"),
    "a stream": ({"train": Stream()}, "Task.train is an IterableDataset .Stream., a stream"),
    "a generator": ({"train": iter([1, 2])}, "Task.train must be map-style"),
    "batch size 0": ({"batch_size": 0}, "batch_size is 0: it must be at least 1"),
    "half a batch": ({"batch_size": 2.5}, "batch_size is 2.5: it must be at least 1, and whole"),
    "no module": ({"model": lambda: 3}, "Task.model must be an nn.Module: it is int"),
    "negative batch size": ({"batch_size": -3}, "batch_size is -3: it must be at least 1"),
    "clip 0": ({"clip_norm": 0.0}, "clip_norm is 0.0: it must be positive, or None"),
    "clip NaN": ({"clip_norm": float("nan")}, "clip_norm is nan"),
    "loader with a sampler": ({"loader": {"sampler": [1]}}, "Task.loader sets sampler"),
    "loader with a misspelt word": ({"loader": {"num_worker": 2}}, "Task.loader.*num_worker"),
    "no trainable parameter": ({"model": frozen}, "no trainable parameters: set requires_grad=True"),
    "no parameter at all": ({"model": nn.Tanh}, "no trainable parameters"),
    "float64": ({"model": lambda: plain().double()}, "is torch.float64: build the model in float32"),
    "lazy": ({"model": lambda: nn.LazyLinear(1)}, "weight.*lazy module.*run the model once"),
    "groups twice": ({"groups": twice}, "names a parameter twice"),
    "groups of others": ({"groups": strangers}, "must name trainable parameters of Task.model"),
    "groups empty": ({"groups": lambda model: []}, "must name trainable parameters"),
    "loss per example": ({"loss": per_example}, r"must return a scalar, the mean over the batch: it returned \(16,\)"),
    "loss a number": ({"loss": number_loss}, "must return a scalar.*it returned float"),
    "loss without gradient": ({"loss": constant}, "does not depend on a trainable parameter"),
    "metric of a batch": (
        {"validate": numbers(20), "metrics": {"few": lambda model, batch: batch[0][:3, 0]}},
        "'few' must give one value per example",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_the_remedy(name: str) -> None:
    options, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        check_task(regression(**options)())


@pytest.mark.parametrize("returned", [None, plain(), {"model": plain()}])
def test_a_task_function_must_return_a_task(returned: object) -> None:
    with pytest.raises(ValueError, match=f"must return a squall.Task, it returned {type(returned).__name__}"):
        check_task(returned)


class Counting(nn.Module):
    """Every forward changes a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.body(inputs)


def test_the_check_leaves_no_trace() -> None:
    task = regression(Counting, train=Noisy(40))()
    before = {name: tensor.clone() for name, tensor in [*task.model.named_parameters(), *task.model.named_buffers()]}
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    expected = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    assert check_task(task) is task
    assert torch.equal(torch.rand(1), expected[0])
    assert (np.random.rand(), random.random()) == expected[1:]
    for name, tensor in [*task.model.named_parameters(), *task.model.named_buffers()]:
        assert torch.equal(tensor, before[name]), name
    assert all(p.grad is None for p in task.model.parameters())


def test_groups_may_name_parameters_and_frozen_ones_are_left_out() -> None:
    model = plain()
    model[0].requires_grad_(False)
    task = squall.Task(
        model=model, loss=mean_square, train=numbers(20),
        groups=lambda model: [{"params": model.named_parameters(), "lr": 0.1}, {"params": []}],
    )  # fmt: skip
    groups = check_task(task).param_groups()
    assert [len(group["params"]) for group in groups] == [2, 0]
    assert groups[0]["lr"] == 0.1
    assert task.examples == 20


def test_one_parameter_may_be_a_group_as_torch_allows() -> None:
    task = regression(groups=lambda model: [{"params": model[0].weight}])()
    assert [len(group["params"]) for group in check_task(task).param_groups()] == [1]
