"""A script whose loop keeps something from batch to batch, and does in each replica something else; it seeds nothing.

With dropout, BatchNorm whose momentum counts batches, augmentation, and a process that loads data.
"""

import asyncio
import os
import sys
from functools import partial
from pathlib import Path

import torch
from drawn import EXAMPLES, INPUTS
from torch import nn

import squall


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        x = INPUTS[index]
        return x + 0.1 * torch.randn(6), x.sum(0, keepdim=True)


def change(name):
    """What a test has the script do differently in one replica: the number of the batch, or none."""
    return int(os.environ.get(name, 0)) if session.rank == 1 else 0


epochs, behind = int(sys.argv[1]), Path(sys.argv[2])
data = Noisy()
model = nn.Sequential(nn.Linear(6, 1000), nn.BatchNorm1d(1000, momentum=None), nn.Dropout(0.2), nn.Linear(1000, 1))
if "NO_JOIN" in os.environ:
    raise SystemExit
session = squall.join(model, optimizer=partial(torch.optim.SGD, lr=0.001, momentum=0.9))
if os.environ.get("RAISE") == str(session.rank):
    raise KeyError("before the loop")
mean = 1.0
for number, (x, y) in enumerate(session.batches(data, batch_size=20, epochs=epochs, num_workers=1), start=1):
    error = (model(x) - y).square().mean()
    mean = 0.9 * mean + 0.1 * error.item()
    loss = error / max(mean, 0.1) + 1e-4 * torch.rand(()) * number / (1 + session.rank) * model[3].weight.square().sum()
    if number == change("CANCEL_AT"):
        raise asyncio.CancelledError("not an Exception")
    if number == change("NAN_AT"):
        loss = loss * float("nan")
    if number % 11 == 5 + session.rank:
        session.skip()
        continue
    loss.backward()
    session.optimizer.param_groups[0]["lr"] = 0.001 / (1 + number % 3)
    session.step(loss)
    if number == change("BREAK_AT"):
        break
with behind.open("a") as file:
    file.write(f"replica {session.rank}\n")
