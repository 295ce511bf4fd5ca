"""The task of blobs.py, whose loss keeps 8 MB of each batch in replica 0 while the file that `LEAKS` names is there."""

import os
from dataclasses import replace
from pathlib import Path

import torch

import squall
from tests.launchers import blobs

KEPT = []
LEAKS = Path(os.environ["LEAKS"])


def task() -> squall.Task:
    whole = blobs.task()

    def loss(model, batch):
        if LEAKS.exists() and Path("/proc/self/cmdline").read_bytes().startswith(b"squall replica 0 "):
            KEPT.append(torch.ones(1 << 21))
        return whole.loss(model, batch)

    return replace(whole, loss=loss)
