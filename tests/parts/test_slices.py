"""Sliced layers update the whole model as plain PyTorch does."""

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
from tests import deep
from tests.parts.replica import apart, plain, replica, train
from tests.tasks import mean_square, numbers


class Perceptron(nn.Module):
    """Layers before, between and behind those that are sliced; LayerNorm, a frozen layer, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.blocks[1].down.requires_grad_(False)
        self.head = nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.front(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).sum(-1, keepdim=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(self.norm(hidden)).tanh())


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(10, 8), nn.Linear(8, 12), nn.Linear(12, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(self.up(self.embedding(tokens)).relu())


def tokens() -> TensorDataset:
    drawn = torch.randint(0, 10, (90, 7), generator=torch.Generator().manual_seed(2))
    return TensorDataset(drawn[:, :-1], drawn[:, 1:])


def entropy(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch[0]).flatten(0, -2)
    right = (logits.argmax(1) == batch[1].flatten()).float().mean()
    return cross_entropy(logits, batch[1].flatten()), {"right": right}


def task(model: Callable[[], nn.Module], layers: Any, **options: Any) -> squall.Task:
    torch.manual_seed(3)
    options = {"loss": mean_square, "train": numbers(90), "batch_size": 16} | options
    return squall.Task(model=model(), split=squall.Tensor(layers), **options)


TOKENS = {"train": tokens(), "loss": entropy}
PAIRS = {"blocks.*.up": "column", "blocks.*.down": "row"}


@pytest.mark.parametrize(
    ("model", "layers", "parts", "options"),
    [
        pytest.param(Perceptron, PAIRS, 2, {}, marks=deep.only),
        pytest.param(Perceptron, PAIRS, 3, {}, marks=deep.only),
        (Perceptron, PAIRS | {"head": "gathered"}, 2, {"clip_norm": 0.05}),
        (
            Embedded,
            {"embedding": "row", "up": "column", "down": "row"},
            2,
            TOKENS,
        ),
        pytest.param(Embedded, {"embedding": "gathered", "down": "gathered"}, 2, TOKENS, marks=deep.only),
    ],
)
def test_fifty_steps_with_momentum_are_those_of_plain_pytorch(
    model: Callable[[], nn.Module], layers: Any, parts: int, options: Any
) -> None:
    check_split(task(model, layers, **options), parts)
    ours = replica(task(model, layers, **options), parts, train())
    theirs = plain(task(model, layers, **options), 1)
    assert apart(ours.vector, theirs.vector) < 1e-5
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-3)
    assert ours.extras == [pytest.approx(each, rel=1e-3) if each else None for each in theirs.extras]


@pytest.mark.parametrize(
    ("layers", "parts", "words"),
    [
        (
            {"*.upp": "column"},
            2,
            r"'\*.upp' names no nn.Linear or nn.Embedding .* has front, blocks.0.up",
        ),
        (PAIRS, 5, "blocks.0.up has 12 outputs, which 5 parts do not divide"),
        ({"blocks.*.up": "column"}, 2, "does not fit together"),
        ({"blocks.*.down": "row"}, 2, "blocks.0.down takes slices of 6 inputs, and is given 12"),
        (PAIRS | {"blocks.0.*": "row"}, 2, "another pattern name blocks.0.up"),
    ],
)
def test_what_cannot_be_sliced(layers: Any, parts: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_split(task(Perceptron, layers), parts)


def test_tied_weights_are_not_sliced() -> None:
    def tied() -> nn.Module:
        model = Perceptron()
        model.blocks[0].up.weight = model.blocks[1].up.weight
        return model

    with pytest.raises(ValueError, match=r"blocks.0.up shares its weights with another module"):
        check_split(task(tied, PAIRS), 2)
