"""A user's own training script, as it would be written for one process, with the four lines that Squall needs."""

import argparse
import hashlib
import itertools
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
from blobs import task as blobs
from torch.nn.functional import cross_entropy

import squall
from squall.runtime.snapshot import Snapshots

options = argparse.ArgumentParser()
options.add_argument("--epochs", type=int, default=3)
options.add_argument("--mode", default="")
options.add_argument("--after", type=Path, help="rank 0 takes its first batch when the others have written this file")
options.add_argument("--stay", type=Path, help="write this file where a mode says to stay")
options = options.parse_args()
mode = options.mode


def stay(where):
    if mode == f"stay {where}":
        options.stay.touch()
        threading.Event().wait()


print("before")
torch.manual_seed(0)
data = blobs()
stay("before")
if mode == "no join":
    sys.exit()
if mode == "raise before":
    raise KeyError("before the join")
session = squall.join(data.model, optimizer=partial(torch.optim.SGD, lr=0.1))
print(f"replica {session.rank} of {session.replicas}, leader {session.is_leader}")
stay("between")
if mode == "no batches":
    sys.exit()
if mode == "step first":
    session.step()
if options.after is not None and session.rank == 0:
    deadline = time.monotonic() + 60
    while not options.after.exists() and time.monotonic() < deadline:
        os.sched_yield()


class Shown:
    """Hands batches on as tqdm does."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        for batch in self.batches:  # noqa: UP028  a frame of its own, as tqdm has it
            yield batch


held = []


def batches():
    dealt = session.batches(data.train, batch_size=64, epochs=options.epochs)
    if mode in ("count", "held", "kept"):
        held.extend([dealt, held])  # a cycle, as frameworks have them
    if mode == "held":
        return Shown(dealt)
    if mode == "kept":
        held.append(iter(dealt))
        return held[-1]
    if mode == "count":
        epochs = (itertools.islice(dealt.epoch, len(dealt.epoch)) for _ in range(options.epochs))
        return itertools.chain.from_iterable(epochs)
    return dealt


weights = Snapshots.weights


def interrupted(*arguments):
    signal.raise_signal(signal.SIGINT)
    return weights(*arguments)


if mode == "held":  # a Ctrl-C comes as the final weights are read
    Snapshots.weights = interrupted


def train():
    for number, batch in enumerate(batches()):
        if number == 5 and (mode == "break" or (mode in ("held", "kept") and session.is_leader)):
            session.log(left=number)
            break
        if number == 5 and session.is_leader:
            stay("within")
        if session.rank == 1 and ((mode, number) == ("raise", 5) or (mode == "stay within" and options.stay.exists())):
            raise KeyError("in the loop")
        loss = cross_entropy(data.model(batch[0]), batch[1])
        loss.backward()
        if mode == "leave":
            os._exit(0)
        if mode == "optimizer":
            session.optimizer.step()
        elif mode != "no step":
            session.step(loss)
        if number % 20 == 0:
            session.evaluate(data.validate, data.metrics)


try:
    train()
except KeyboardInterrupt as error:
    if mode != "catch":
        raise
    print(f"caught {type(error).__name__}, {session.status}")
if mode == "count":
    held[0].close()
if options.after is not None and session.rank != 0:
    options.after.touch()
if mode == "twice":
    list(session.batches(data.train))
session.evaluate(data.validate, data.metrics)
if session.is_leader and options.stay is not None and not options.stay.exists():  # a resume goes on
    stay("behind")
weights = torch.cat([p.detach().flatten() for p in data.model.parameters()])
print(f"weights {hashlib.sha256(weights.numpy().tobytes()).hexdigest()}")
