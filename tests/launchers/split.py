"""A task whose split the environment names."""

import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import squall
from tests.launchers import blobs

HOW = os.environ.get("SPLIT", "zero-bubble")
EXAMPLES = 512  # of the blobs' first: parts of two machines take a hundred times as long for each as one process


class Columns(nn.Module):
    """Two branches that cross once, with BatchNorm in the second, between layers that both parts compute."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.left, self.right = (nn.ModuleList([nn.Linear(16, 8), nn.Linear(16, 8)]) for _ in range(2))
        self.norm = self.right.append(nn.BatchNorm1d(8))[2]
        self.head = nn.Linear(16, 8)

    def forward(self, inputs):
        stem = self.stem(inputs).tanh()
        crossing = torch.cat([self.left[0](stem), self.right[2](self.right[0](stem))], 1).tanh()
        return self.head(torch.cat([self.left[1](crossing), self.right[1](crossing)], 1))


def deep():
    layers = [nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 24)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(24, 8))


SPLITS = {
    "branches": (Columns, squall.Branches("left", "right")),
    "slices": (deep, squall.Tensor({"0": "column", "2": "row", "7": "gathered"})),
    **{
        schedule: (deep, squall.Pipeline(lambda m: [*m], microbatches=4, schedule=schedule))
        for schedule in ("1f1b", "interleaved", "zero-bubble")
    },
}


def loss(model, batch):
    value = cross_entropy(model(batch[0]), batch[1])
    return value, {"loss twice": 2 * value.item()}


def task() -> squall.Task:
    blob = blobs.task()
    model, split = SPLITS[HOW]
    return squall.Task(
        model=model(),
        loss=loss,
        train=TensorDataset(*(each[:EXAMPLES] for each in blob.train.tensors)),
        validate=blob.validate,
        batch_size=16,
        metrics=blob.metrics,
        split=split,
    )
