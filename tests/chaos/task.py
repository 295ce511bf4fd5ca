"""What the trials of `tests.chaos` train, as a task and as a script of its own: blobs, with faults by request.

A file in the working directory asks for one: whoever takes `nan` away gives one loss that is NaN, whoever takes `raise`
away raises; while `always nan` is there, every loss is NaN.
"""

import os
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import squall

EXAMPLES, CLASSES, FEATURES = 4096, 8, 64


def asked_for(fault: str) -> bool:
    try:
        os.unlink(fault)
    except FileNotFoundError:
        return False
    return True


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    if asked_for("raise"):
        raise KeyError("asked for")
    value = cross_entropy(model(batch[0]), batch[1])
    return value * torch.nan if asked_for("nan") or os.path.exists("always nan") else value


def accuracy(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float()


def task() -> squall.Task:
    """The rule of the data: torch.Generator, seed 0; eight Gaussian blobs."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(EXAMPLES + 512) % CLASSES
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    inputs = centres[labels] + torch.randn(len(labels), FEATURES, generator=generator)
    return squall.Task(
        model=nn.Sequential(nn.Linear(FEATURES, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, CLASSES)),
        loss=loss,
        train=TensorDataset(inputs[:EXAMPLES], labels[:EXAMPLES]),
        validate=TensorDataset(inputs[EXAMPLES:], labels[EXAMPLES:]),
        batch_size=32,
        metrics={"accuracy": accuracy},
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    data = task()
    session = squall.join(data.model)
    for batch in session.batches(data.train, batch_size=data.batch_size, epochs=int(sys.argv[1])):
        value = loss(data.model, batch)
        value.backward()
        session.step(value)
    session.evaluate(data.validate, data.metrics)
    if session.is_leader:
        torch.save(data.model.state_dict(), "final.pt")
