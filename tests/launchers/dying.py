"""A task of which replica 1 dies in its every first batch, and the evaluator in its every evaluation.

Replica 0 takes its time until the file that `ENOUGH` names is there.
"""

import os
import signal
import threading
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import squall

ENOUGH = Path(os.environ["ENOUGH"])


def is_role(role: str) -> bool:
    return Path("/proc/self/cmdline").read_bytes().startswith(f"squall {role} ".encode())


def loss(model, batch):
    if is_role("replica 1"):
        os.kill(os.getpid(), signal.SIGKILL)
    if is_role("replica 0") and not ENOUGH.exists():
        threading.Event().wait(0.02)
    return model(batch[0]).square().mean()


def fatal(model, batch):
    if is_role("evaluator"):
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.zeros(len(batch[0]))


def task() -> squall.Task:
    data = TensorDataset(torch.ones(4096, 4))
    return squall.Task(
        model=nn.Linear(4, 1), loss=loss, train=data, validate=data, batch_size=16, metrics={"fatal": fatal}
    )
