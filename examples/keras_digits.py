"""The network of many first courses, written in Keras 3 on its torch backend, trained by any strategy.

    squall train examples/keras_digits.py
    squall train examples/keras_digits.py --strategy diloco --replicas 2

The loss and the metrics are named as for `keras.Model.compile`, and `squall.keras.save_keras(run.model, path)` writes
what came of it as a .keras file. A layer of Keras makes the pictures brighter or darker, the same way in a replay. The
digits have MNIST's shape, 28 x 28, enlarged from scikit-learn's `load_digits`; nothing is downloaded. Needs:
pip install 'squall-train[keras]'
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import keras
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import squall
from squall.keras import Seeded

strategy = squall.Downpour(replicas=2, optimizer=partial(torch.optim.Adam, lr=1e-3))
epochs = 10


def task() -> squall.Task:
    train, test = split()
    return squall.Task.from_keras(
        network(),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        train=Lit(*train.tensors),
        validate=test,
        batch_size=32,
    )


class Lit(Dataset[Any]):
    """Pictures that a layer of Keras makes brighter or darker, a batch at once."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels
        self.lit = Seeded(keras.layers.RandomBrightness(0.2, value_range=(0, 1)))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.lit(self.images[indices]), self.labels[indices]))


def network() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


def split() -> tuple[TensorDataset, TensorDataset]:
    """1,437 digits to train on and 360 to test on, 28 x 28 x 1, 0 to 1."""
    digits = load_digits()
    small: Tensor = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = nn.functional.interpolate(small, size=(28, 28), mode="bilinear").movedim(1, 3)
    labels: Tensor = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


if __name__ == "__main__":
    print(squall.fit(task, strategy, epochs=epochs).summary())
