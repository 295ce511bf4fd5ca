"""Handwritten digits, read by a small convolutional network: the quickest look at asynchronous training.

    squall train examples/digits.py
    squall train examples/digits.py --strategy synchronous --replicas 2

The 1,797 images are scikit-learn's `load_digits` and come with that package: nothing is downloaded.
Without scikit-learn: pip install 'squall-train[examples]'
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import squall

SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.02, momentum=0.9)

strategy = squall.Downpour(replicas=2, shards=1, optimizer=partial(torch.optim.Adagrad, lr=0.02))
epochs = 15

# What `--strategy NAME` takes here: settings that reach 97 % with 4 replicas within three times the examples that one
# process needs (benchmarks/family.py). docs/strategies.md says how to choose them.
strategies = (
    squall.Synchronous(optimizer=partial(torch.optim.SGD, lr=0.3)),
    squall.Synchronous(optimizer=partial(torch.optim.SGD, lr=0.3), backup=1),
    squall.BoundedDelay(optimizer=SGD, max_delay=4),
    strategy,
    squall.AsynchronousSGD(optimizer=SGD, staleness="scale"),
    squall.AsynchronousSGD(optimizer=SGD, staleness="compensate"),
    squall.DelayedProximal(optimizer=SGD, l1=1e-5),
    squall.Averaging(optimizer=MOMENTUM, every=8),
    squall.ElasticAveraging(optimizer=MOMENTUM, every=4),
    squall.DiLoCo(optimizer=partial(torch.optim.AdamW, lr=2e-3), inner_steps=20, outer_lr=1.0, outer_momentum=0.3),
    squall.DiLoCo(
        optimizer=partial(torch.optim.AdamW, lr=2e-3), inner_steps=20, outer_lr=1.0, outer_momentum=0.5,
        form="asynchronous",
    ),
    squall.DiLoCo(
        optimizer=partial(torch.optim.AdamW, lr=2e-3), inner_steps=20, outer_lr=1.0, outer_momentum=0.3,
        form="decoupled",
    ),
)  # fmt: skip


def task() -> squall.Task:
    train, test = split()
    return squall.Task(
        model=network(),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        train=train,
        validate=test,
        batch_size=32,
        metrics={"accuracy": lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).float()},
    )


def split() -> tuple[TensorDataset, TensorDataset]:
    """1,437 digits to train on and 360 to test on, the same ones in every process."""
    from sklearn.datasets import load_digits  # here, so that reading this file for its settings is quick

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8], 0 to 1
    labels: Tensor = torch.tensor(digits.target)  # [1797]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),  # [batch, 16, 8, 8]
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),  # [batch, 32, 4, 4]
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


if __name__ == "__main__":
    print(squall.fit(task, strategy, epochs=epochs).summary())
