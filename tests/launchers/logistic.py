"""Logistic regression on overlapping Gaussian classes: many iterations of L-BFGS. Rule: torch.Generator, seed 0."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import squall

EXAMPLES = 1500


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1]) + 1e-3 * model.weight.square().sum()


def task() -> squall.Task:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(EXAMPLES) % 6
    scales = torch.logspace(-1, 0.7, 40)  # ill conditioned
    centres, noise = (torch.randn(count, 40, generator=generator) for count in (6, EXAMPLES))
    inputs = (0.3 * centres[labels] + noise) * scales
    model = nn.Linear(40, 6)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    data = TensorDataset(inputs, labels)
    return squall.Task(model=model, loss=loss, train=data, validate=data, batch_size=100)
