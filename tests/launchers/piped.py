"""The blobs, on a model that can be split in any way. A part that the environment names raises in its loss.

The environment also says how many processes load data, and how many examples there are.
"""

import dataclasses
import os

from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import squall
from tests.launchers import blobs

RAISES = os.environ.get("RAISES", "nobody")


def loss(model, batch):
    with open("/proc/self/cmdline") as title:
        if RAISES in title.read():
            raise RuntimeError("the user's own mistake")
    return cross_entropy(model(batch[0]), batch[1])


def task() -> squall.Task:
    blob, loader = blobs.task(), {"num_workers": int(os.environ.get("WORKERS", "0"))}
    train = TensorDataset(*(each[: int(os.environ.get("EXAMPLES", blobs.EXAMPLES))] for each in blob.train.tensors))
    return dataclasses.replace(blob, loss=loss, train=train, loader=loader, split=squall.Pipeline(microbatches=2))
