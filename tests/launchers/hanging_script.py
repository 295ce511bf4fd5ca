"""A loop whose replica 1 goes away between two batches, for as long as it takes, as `HANGING` says (`hanging`)."""

import os
import threading
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import squall

FOLDER = Path(os.environ["HANGING"])
model = nn.Linear(4, 1)
data = TensorDataset(torch.ones(100_000, 4))
session = squall.join(model, optimizer=partial(torch.optim.SGD, lr=0.1))
for batch in session.batches(data, batch_size=8, epochs=1000):
    threading.Event().wait(0.005)
    away = FOLDER / "away"
    if session.rank == 1 and away.exists():
        seconds = float(away.read_text())
        away.unlink()
        threading.Event().wait(seconds)
    loss = model(batch[0]).square().mean()
    loss.backward()
    session.step(loss)
