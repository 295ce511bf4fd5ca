"""A user's script whose replicas may be a group: with momentum, rates that its loop sets, and batches that go wrong."""

import argparse
import math
import signal
import threading
from pathlib import Path

import torch
from blobs import task as blobs
from torch.nn.functional import cross_entropy

import squall

options = argparse.ArgumentParser()
options.add_argument("--epochs", type=int, default=1)
options.add_argument("--mode", default="")
options.add_argument("--file", type=Path)
options = options.parse_args()
mode = options.mode

data = blobs()
model = data.model
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
session = squall.join(model, optimizer)
optimizer = session.optimizer


def tried():
    """Whether a process has been here before."""
    known = options.file.exists()
    options.file.touch()
    return known


def loss_of(batch, number):
    loss = cross_entropy(model(batch[0]), batch[1])
    strange = session.rank == 1 and ((mode == "nan" and number == 5) or (mode == "nan twice" and number in (5, 6)))
    return loss * math.nan if strange else loss


for number, batch in enumerate(session.batches(data.train, batch_size=64, epochs=options.epochs)):
    if mode == "rates":
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + number + session.rank)
    loss = loss_of(batch, number)
    loss.backward()
    if mode == "skip" and (session.rank == number % 3 or number == 7):
        session.skip()
        continue
    optimizer.step()
    session.log(loss=loss.item())
    if number == 5 and session.rank == 0 and mode == "evaluating" and not tried():
        threading.Event().wait()
    if number == 5 and session.rank == 1 and mode == "dies" and not tried():
        signal.raise_signal(signal.SIGKILL)
torch.save(model.state_dict(), options.file.with_suffix(f".weights-{session.rank}"))
