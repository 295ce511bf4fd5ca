"""A task that starts in no time: eight Gaussian blobs in the plane. Its rule: torch.Generator, seed 0."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import squall

EXAMPLES = 4096


def task(batch_size: int = 16) -> squall.Task:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(EXAMPLES + 512) % 8
    centres = torch.randn(8, 16, generator=generator)
    inputs = centres[labels] + 0.3 * torch.randn(len(labels), 16, generator=generator)
    return squall.Task(
        model=nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8)),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        train=TensorDataset(inputs[:EXAMPLES], labels[:EXAMPLES]),
        validate=TensorDataset(inputs[EXAMPLES:], labels[EXAMPLES:]),
        batch_size=batch_size,
        metrics={"accuracy": lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).float()},
    )
