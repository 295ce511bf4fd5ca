"""A task with everything that draws chance: dropout, augmentation in loader processes, BatchNorm. Rule: seed 0."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import squall

EXAMPLES = 2048


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """Eight Gaussian blobs; each item is shifted, scaled and flipped anew whenever it is loaded."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(EXAMPLES) % 8
        self.inputs = torch.randn(8, 16, generator=generator)[self.labels]

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        item = self.inputs[index] + 0.1 * torch.randn(16)
        item = item * float(np.random.uniform(0.9, 1.1))
        return (item.flip(0) if random.random() < 0.1 else item), int(self.labels[index])


def task() -> squall.Task:
    return squall.Task(
        model=nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 8)),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        train=Augmented(),
        batch_size=16,
        loader={"num_workers": 1},
    )
