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
    """As the file is called."""
    title = Path("/proc/self/cmdline").read_bytes().decode().removeprefix("squall ")
    return title.partition(" of ")[0].rstrip("\0")


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
    return (model(batch[0]) - batch[1]).square().mean()


def task() -> squall.Task:
    torch.manual_seed(0)
    inputs, noise = torch.randn(100_000, 4), torch.randn(100_000, 1)  # to learn this takes for ever, also L-BFGS
    data, held = TensorDataset(inputs, noise), TensorDataset(inputs[:64], noise[:64])
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    return squall.Task(
        model=model, loss=loss, train=data, validate=held, batch_size=8, split=squall.Pipeline(microbatches=2)
    )
