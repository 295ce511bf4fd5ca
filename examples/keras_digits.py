"""The network of many first courses, written in Keras 3 on its torch backend, trained by any strategy.

    squall train examples/keras_digits.py
    squall train examples/keras_digits.py --strategy diloco --replicas 2

Keras on torch makes an ordinary `nn.Module`, so nothing here is special to Squall. The digits have MNIST's shape,
28 x 28, enlarged from scikit-learn's `load_digits`; nothing is downloaded. Needs: pip install 'squall-train[keras]'
"""

from __future__ import annotations

import os
from functools import partial

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import keras
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import squall

strategy = squall.Downpour(replicas=2, optimizer=partial(torch.optim.Adam, lr=1e-3))
epochs = 10


def task() -> squall.Task:
    keras.utils.set_random_seed(torch.initial_seed() % 2**31)  # so that the run's seed decides Keras's weights too
    train, test = split()
    return squall.Task(
        model=network(),
        loss=lambda model, batch: keras.ops.mean(
            keras.losses.sparse_categorical_crossentropy(batch[1], model(batch[0]))
        ),
        train=train,
        validate=test,
        batch_size=32,
        metrics={"accuracy": lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).float()},
    )


def network() -> nn.Module:
    layers = keras.layers
    model: nn.Module = keras.Sequential(
        [
            keras.Input((28, 28)),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    return model


def split() -> tuple[TensorDataset, TensorDataset]:
    """1,437 digits to train on and 360 to test on, 28 x 28, 0 to 1."""
    digits = load_digits()
    small: Tensor = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = nn.functional.interpolate(small, size=(28, 28), mode="bilinear").squeeze(1)
    labels: Tensor = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


if __name__ == "__main__":
    print(squall.fit(task, strategy, epochs=epochs).summary())
