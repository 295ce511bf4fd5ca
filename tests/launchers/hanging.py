"""Tasks of which processes hang, or are merely slow. They are told which by a folder, `HANGING`.

A file there that is called as a process, such as "replica 1", has its next loss never return, once. One called "slow"
has replica 1 take that long for each.
"""

import os
import threading
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import squall

FOLDER = Path(os.environ["HANGING"])
NEVER = 1e6


def role() -> str:
    return Path("/proc/self/cmdline").read_bytes().decode().removeprefix("squall ").partition(" of ")[0]


def wait(seconds: float) -> None:
    threading.Event().wait(seconds)


def loss(model, batch):
    mine = FOLDER / role()
    if mine.exists():
        mine.unlink()
        wait(NEVER)
    if role() == "replica 1" and (FOLDER / "slow").exists():
        wait(float((FOLDER / "slow").read_text()))
    else:
        wait(0.005)
    return model(batch[0]).square().mean()


def task() -> squall.Task:
    data = TensorDataset(torch.ones(100_000, 4))
    held = TensorDataset(torch.ones(64, 4))
    return squall.Task(model=nn.Linear(4, 1), loss=loss, train=data, validate=held, batch_size=8)
