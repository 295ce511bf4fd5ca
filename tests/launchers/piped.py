"""The blobs, on a model that can be split in any way. A part that the environment names raises in its loss.

The environment also says how many processes load data.
"""

import dataclasses
import os

from torch.nn.functional import cross_entropy

import squall
from tests.launchers import blobs

RAISES = os.environ.get("RAISES", "nobody")


def loss(model, batch):
    with open("/proc/self/cmdline") as title:
        if RAISES in title.read():
            raise RuntimeError("the user's own mistake")
    return cross_entropy(model(batch[0]), batch[1])


def task() -> squall.Task:
    loader = {"num_workers": int(os.environ.get("WORKERS", "0"))}
    return dataclasses.replace(blobs.task(), loss=loss, loader=loader, split=squall.Pipeline(microbatches=2))
