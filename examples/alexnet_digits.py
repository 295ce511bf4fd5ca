"""A small AlexNet in two columns, as the paper drew it: each column is a part of a replica of its own.

    squall train examples/alexnet_digits.py
    squall train examples/alexnet_digits.py --parts 2      every replica is two processes, a column each

The columns do not know of each other but where the third convolution, and the fully connected layers, take what both
have found: what crosses from process to process is these layers' inputs, and on the way back their gradients.

The data are scikit-learn's `load_digits`, which come with that package: nothing is downloaded.
Without scikit-learn: pip install 'squall-train[examples]'

Source: Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural Networks", NIPS 2012,
figure 2; normalisation, overlapping pools and dropout are as there, the sizes are a digit's.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import squall

strategy = squall.Downpour(replicas=1, shards=1, optimizer=partial(torch.optim.Adagrad, lr=0.02))
epochs = 8


def task() -> squall.Task:
    train, test = digits()
    return squall.Task(
        model=AlexNet(),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        train=train,
        validate=test,
        batch_size=32,
        metrics={"accuracy": lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).float()},
        split=squall.Branches("left", "right"),
    )


class AlexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = column(), column()
        self.head = nn.Linear(2 * 64, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):  # the paper's own beginning takes more than these few steps
                nn.init.kaiming_normal_(module.weight)

    def forward(self, images: Tensor) -> Tensor:
        found = images  # [batch, 1, 8, 8]
        for left, right in zip(self.left, self.right):
            found = torch.cat([left(found), right(found)], 1)
        logits: Tensor = self.head(found)  # [batch, 10]
        return logits


def column() -> nn.ModuleList:
    """What one column does between the layers that see both."""
    return nn.ModuleList([
        nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.LocalResponseNorm(5),
            nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2, 1),
        ),  # [batch, 24, 4, 4]
        nn.Sequential(
            nn.Conv2d(2 * 24, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Flatten(),
        ),  # [batch, 24 * 2 * 2]
        nn.Sequential(nn.Dropout(0.5), nn.Linear(2 * 24 * 4, 64), nn.ReLU()),
        nn.Sequential(nn.Dropout(0.5), nn.Linear(2 * 64, 64), nn.ReLU()),
    ])  # fmt: skip


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 digits to train on and 360 to test on, the same ones in every process."""
    from sklearn.datasets import load_digits  # here, so that reading this file for its settings is quick

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8], 0 to 1
    labels: Tensor = torch.tensor(found.target)  # [1797]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


if __name__ == "__main__":
    print(squall.fit(task, strategy, epochs=epochs).summary())
