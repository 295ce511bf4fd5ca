"""A pipeline's updates are those of plain PyTorch on the same microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import squall
from tests import deep
from tests.parts.replica import apart, plain, replica, train
from tests.tasks import mean_square, numbers


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def normed() -> nn.Module:
    """LayerNorm, an activation in place where a stage begins, and a frozen layer."""
    model = nn.Sequential(
        nn.Linear(6, 16),
        nn.LayerNorm(16),
        nn.Linear(16, 16),
        nn.ReLU(inplace=True),
        nn.Linear(16, 16),
        nn.Linear(16, 1),
    )
    model[4].requires_grad_(False)
    return model


def frozen_front() -> nn.Module:
    model = sequential()
    model[0].requires_grad_(False)
    return model


class _Front(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return _doubled(self.embedding(tokens))


def _doubled(hidden: Tensor) -> tuple[Tensor, Tensor]:
    return hidden, hidden.mean(1, keepdim=True)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, mean: Tensor) -> Tensor:
        return hidden + self.inner(hidden - mean).tanh()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = _Front(nn.Embedding(10, 8))
        self.block = _Block()
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.front.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(*self.front(tokens)))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 5),
    )


def tokens() -> TensorDataset:
    drawn = torch.randint(0, 10, (90, 7), generator=torch.Generator().manual_seed(2))
    return TensorDataset(drawn[:, :-1], drawn[:, 1:])


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(90, 1, 8, 8, generator=generator), torch.arange(90) % 5)


def entropy(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss with numbers beside it."""
    logits = model(batch[0]).flatten(0, -2)
    right = (logits.argmax(1) == batch[1].flatten()).float().mean()
    return cross_entropy(logits, batch[1].flatten()), {"right": right, "one": torch.tensor(1.0)}


def task(model: Callable[[], nn.Module], split: squall.Pipeline, **options: Any) -> squall.Task:
    torch.manual_seed(3)
    options = {"loss": mean_square, "train": numbers(90), "batch_size": 16, "split": split} | options
    return squall.Task(model=model(), **options)


def same_updates(model: Callable[[], nn.Module], starts: Sequence[int], split: squall.Pipeline, **options: Any) -> None:
    each = split.stages_each
    ours = replica(task(model, split, **options), len(starts) // each, train(), starts)
    theirs = plain(task(model, split, **options), split.microbatches)
    assert apart(ours.vector, theirs.vector) < 1e-6
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.extras == [pytest.approx(each, rel=1e-5) if each else None for each in theirs.extras]


@pytest.mark.parametrize(
    ("schedule", "starts"),
    [
        ("1f1b", (0, 2)),
        pytest.param("gpipe", (0, 2), marks=deep.only),
        pytest.param("1f1b", (0, 1, 4), marks=deep.only),
        pytest.param("gpipe", (0, 1, 4), marks=deep.only),
        pytest.param("interleaved", (0, 1, 2, 4), marks=deep.only),
        ("zero-bubble", (0, 1, 2, 4)),
    ],
)
def test_fifty_steps_with_momentum_are_those_of_plain_pytorch(schedule: Any, starts: Sequence[int]) -> None:
    """90 examples in batches of 16: the last of an epoch has two microbatches of 4 and one of 2."""
    same_updates(sequential, starts, squall.Pipeline(microbatches=4, schedule=schedule))


@pytest.mark.parametrize("schedule", deep.sweep(["1f1b", "gpipe"], 1))
@pytest.mark.parametrize(
    ("model", "starts", "data", "loss"),
    [(normed, (0, 3), numbers, mean_square), (frozen_front, (0, 1), numbers, mean_square),
     pytest.param(convolutions, (0, 3), images, entropy, marks=deep.only),
     pytest.param(Tied, (0, 1), tokens, entropy, marks=deep.only), (Tied, (0, 1, 2), tokens, entropy)],
)  # fmt: skip
def test_kinds_of_models(
    model: Callable[[], nn.Module], starts: Sequence[int], data: Any, loss: Any, schedule: Any
) -> None:
    """LayerNorm and frozen parameters, BatchNorm in a convolution net, tied weights on two parts, numbers beside the
    loss."""
    stages = (lambda m: [m.front, m.block, m.head]) if model is Tied else None
    split = squall.Pipeline(stages, microbatches=4, schedule=schedule)
    same_updates(model, starts, split, train=data(90) if data is numbers else data(), loss=loss)


@pytest.mark.parametrize("schedule", deep.sweep(["zero-bubble", "interleaved"], 1))
@deep.only
def test_tied_weights_with_two_stages_a_part(schedule: Any) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 1))
        model[2].weight = model[1].weight
        model[3].requires_grad_(False)
        return model

    same_updates(tied, (0, 1, 2, 3), squall.Pipeline(microbatches=4, schedule=schedule))


@deep.only
def test_gradients_are_clipped_by_the_norm_of_the_whole() -> None:
    same_updates(sequential, (0, 2), squall.Pipeline(microbatches=4), clip_norm=0.05)


@deep.only
def test_groups_of_parameters() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = [*model.named_parameters()]
        return [
            {"params": [p for n, p in named if "bias" in n]}, {"params": [p for n, p in named if "weight" in n]},
        ]  # fmt: skip

    same_updates(sequential, (0, 2), squall.Pipeline(microbatches=4), groups=groups)
