"""A network of a fourteenth of the parameters of that in digits.py, trained on what that one says of each digit.

squall train examples/digits.py --run-dir runs/digits
squall distill runs/digits examples/digits_student.py
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from digits import task as teacher
from torch import nn

import squall

strategy = squall.Synchronous(replicas=2, optimizer=partial(torch.optim.Adam, lr=0.01))
epochs = 60


def task() -> squall.Task:
    return replace(teacher(), model=network())


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(),  # [batch, 4, 4, 4]
        nn.Flatten(), nn.Linear(4 * 4 * 4, 10),
    )  # fmt: skip
