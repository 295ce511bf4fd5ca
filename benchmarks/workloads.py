"""The two trainings that Squall and its peers are measured on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SEED = 2012


@dataclass(frozen=True, eq=False)
class Workload:
    """A multilayer perceptron, its data in memory, and how to train it with plain SGD and cross entropy."""

    name: str
    widths: tuple[int, ...]  # inputs, hidden layers, classes
    train_inputs: Tensor  # [examples, widths[0]], float32
    train_labels: Tensor  # [examples], int64
    test_inputs: Tensor
    test_labels: Tensor
    batch_size: int  # examples in a step of one replica
    lr: float
    order_seed: int = SEED  # of the order in which epochs visit the examples

    def model(self) -> nn.Sequential:
        """A new model; every call returns the same initial weights and leaves torch's global seed alone."""
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            for inputs, outputs in pairwise(self.widths):
                layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def train_set(self) -> TensorDataset:
        return TensorDataset(self.train_inputs, self.train_labels)

    def test_set(self) -> TensorDataset:
        return TensorDataset(self.test_inputs, self.test_labels)

    def epoch(self, number: int, replica: int = 0, replicas: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """One replica's batches of one epoch: every `replicas`-th example of the epoch's seeded permutation.

        Together the replicas see each example once; a last, incomplete batch is left out.
        """
        generator = torch.Generator().manual_seed(self.order_seed + number)
        order = torch.randperm(len(self.train_inputs), generator=generator)[replica::replicas]
        for start in range(0, len(order) - self.batch_size + 1, self.batch_size):
            index = order[start : start + self.batch_size]
            yield self.train_inputs[index], self.train_labels[index]


def speech_mlp() -> Workload:
    """A network of the size used for speech frames, 440-2048-2048-1024: 7.2 million parameters, batch 64.

    The data are made, not recorded: 4096 + 1024 frames of standard normal numbers (torch.Generator, seed
    2012), each labelled with the largest of 1024 outputs of one fixed linear teacher, whose weights are
    standard normal numbers drawn after the frames from the same generator. It is there to measure speed.
    """
    generator = torch.Generator().manual_seed(SEED)
    frames = torch.randn(4096 + 1024, 440, generator=generator)
    teacher = torch.randn(440, 1024, generator=generator)
    labels = (frames @ teacher).argmax(1)
    return Workload(
        name="speech_mlp",
        widths=(440, 2048, 2048, 1024),
        train_inputs=frames[:4096].clone(),
        train_labels=labels[:4096].clone(),
        test_inputs=frames[4096:].clone(),
        test_labels=labels[4096:].clone(),
        batch_size=64,
        lr=0.05,
    )


def digits_mlp(hidden: tuple[int, ...] = (256, 256)) -> Workload:
    """scikit-learn's 1,797 handwritten digits, pixels scaled to [0, 1], network 64-256-256-10 by default, batch 32.

    Split by a permutation with seed 2012: the first 80 % (1,437) to train, the others (360) to test.
    """
    # Imported here, since every process of a peer imports this module, and only the first makes the data.
    from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]

    pixels, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(SEED))
    inputs = (torch.from_numpy(pixels).float() / 16.0)[order]
    labels = torch.from_numpy(digits).long()[order]
    cut = len(inputs) * 8 // 10
    return Workload(
        name="digits_mlp",
        widths=(64, *hidden, 10),
        train_inputs=inputs[:cut].clone(),
        train_labels=labels[:cut].clone(),
        test_inputs=inputs[cut:].clone(),
        test_labels=labels[cut:].clone(),
        batch_size=32,
        lr=0.05,
    )
