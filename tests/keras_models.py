"""Keras models that tests train. Keras takes two seconds to import, so only tests that need it import this."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported

import keras

import squall
from squall.keras import Seeded
from squall.task import TaskFunction


class Scale(keras.Layer):
    """A layer of the user's own, not registered with Keras, that counts in training and has a loss of its own."""

    def __init__(self, start: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.start = start

    def build(self, shape: Any) -> None:
        initial = keras.initializers.Constant(self.start)
        self.scale = self.add_weight(shape=(shape[-1],), initializer=initial, name="scale")
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls")

    def call(self, inputs: Tensor, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1)
        self.add_loss(1e-3 * keras.ops.mean((self.scale - 1) ** 2))
        return inputs * self.scale

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "start": self.start}


def backbone() -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)), layers.RandomFlip("horizontal"), layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.5), layers.ReLU(), layers.Flatten(),
        ],
        name="backbone",
    )  # fmt: skip


def network() -> Any:
    layers = [keras.Input((6, 6, 1)), backbone(), Scale(1.5), keras.layers.Dropout(0.1, seed=5), keras.layers.Dense(3)]
    return keras.Sequential(layers)


def images(count: int) -> tuple[Tensor, Tensor]:
    """Three classes of pictures [6, 6, 1]: bright rows at the top, in the middle, below. Rule: torch.Generator."""
    labels = torch.arange(count) % 3
    pictures = 0.3 * torch.randn(count, 6, 6, 1, generator=torch.Generator().manual_seed(1))
    for place in range(3):
        pictures[labels == place, 2 * place : 2 * place + 2] += 1
    return pictures, labels


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.pictures, self.labels = images(96)
        self.lit = Seeded(keras.layers.RandomBrightness(0.2, value_range=(-2, 3)))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.lit(self.pictures[index]), self.labels[index]


def gap(targets: Tensor, outputs: Tensor) -> Tensor:
    """A loss of the user's own, with one number per example."""
    return nn.functional.cross_entropy(outputs, targets.long(), reduction="none")


def classification(build: Callable[[], Any] = network, loss: Any = gap, **options: Any) -> TaskFunction:
    given = {"batch_size": 16, "validate": TensorDataset(*images(60)), "metrics": ["accuracy"], **options}
    return lambda: squall.Task.from_keras(build(), loss=loss, train=Augmented(), **given)


def close(targets: Tensor, outputs: Tensor) -> Tensor:
    return (outputs.softmax(1).gather(1, targets.long()[:, None]) > 0.5).float()


class Network(keras.Model):
    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.hidden, self.head = keras.layers.Dense(width), keras.layers.Dense(3)
        self.normal = keras.layers.BatchNormalization()

    def call(self, inputs: Tensor, training: bool = False) -> Any:
        return self.head(self.normal(self.hidden(keras.ops.reshape(inputs, (-1, 36))), training=training))


class Telling(Network):
    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": 4}
