"""Small models of the kinds that are exported, each in a task with a batch of its own shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

import squall


def classes(images: Tensor, **options: Any) -> squall.Task:
    """Images [examples, ...] in four classes, which a few of their values tell."""
    data = TensorDataset(images, images.flatten(1)[:, :4].argmax(1))
    options = {
        "model": mlp(), "loss": lambda model, batch: cross_entropy(model(batch[0]), batch[1]), "train": data,
        "validate": data, "batch_size": 16, "metrics": {"accuracy": accuracy},
    } | options  # fmt: skip
    return squall.Task(**options)


def accuracy(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float()


def features(examples: int = 80) -> Tensor:
    return torch.randn(examples, 12, generator=torch.Generator().manual_seed(0))


def images(examples: int = 40) -> Tensor:
    return torch.randn(examples, 1, 6, 6, generator=torch.Generator().manual_seed(0))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4)
    )


class Tied(nn.Module):
    """Tokens [batch, time] and what to leave out of them -> logits [batch, time, 20] by the same embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor, scale: float = 1.0, *, mask: Tensor) -> dict[str, Tensor]:
        hidden = self.inner(self.embedding(tokens)) * mask.unsqueeze(2) * scale
        return {"logits": hidden @ self.embedding.weight.T, "hidden": hidden}


def tokens_task() -> squall.Task:
    """A model of two inputs, one by name, with a dict for its output; batches are dicts."""
    return squall.Task(
        model=Tied(), loss=_token_loss, train=Tokens(), validate=Tokens(), batch_size=8, metrics={"hits": _hits}
    )


class Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = torch.arange(index, index + 6) * 7 % 20
        return {"text": text[:-1], "next": text[1:], "mask": (torch.arange(5) < 4).float()}


def _token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["text"], mask=batch["mask"])["logits"].transpose(1, 2), batch["next"])


def _hits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(mask=batch["mask"], tokens=batch["text"])["logits"]
    return (found.argmax(2) == batch["next"]).float()
