"""A small recurrent network, trained on what the transformer of stdlib_lm.py says of each byte.

    squall train examples/stdlib_lm.py --run-dir runs/lm
    squall distill runs/lm examples/stdlib_student.py --temperature 1

The teacher's outputs are 256 numbers for each byte, 64 kB for each window of 128: here 130 MB.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from stdlib_lm import source, windows
from stdlib_lm import task as teacher
from torch import Tensor, nn

import squall

WIDTH, WINDOWS = 48, 2_000

strategy = squall.Synchronous(replicas=2, optimizer=partial(torch.optim.Adam, lr=0.01))
epochs = 4


def task() -> squall.Task:
    train = windows(source(held_out=False), WINDOWS)
    return replace(teacher(), model=Recurrent(), train=train, groups=None, schedule=None, split=None)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.guess = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:  # integers [batch, time] -> logits [batch, time, 256]
        logits: Tensor = self.guess(self.memory(self.bytes(text))[0])
        return logits
