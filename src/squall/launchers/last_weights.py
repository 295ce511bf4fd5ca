"""The last weights of a script's run, on every machine: its scripts go on with them behind their loops."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from squall.launchers.member_messages import PIECE_BYTES
from squall.protocol.nodes import COORDINATOR
from squall.runtime.job import Job
from squall.runtime.snapshot import Snapshots

NAME = "weights"  # file of a machine that has joined


def last_weights(job: Job) -> Tensor | None:
    """Of the newest snapshot; None where there is none. Raises `DamagedSnapshot`."""
    if job.site is None or job.site.has(COORDINATOR):
        return newest(job.directory)
    path = job.directory / NAME
    whole = path.exists() and path.stat().st_size == 4 * job.layout.length
    return torch.from_file(str(path), size=job.layout.length) if whole else None


def newest(directory: Path) -> Tensor | None:
    """In the directory of a run."""
    snapshots = Snapshots(directory)
    numbers = snapshots.numbers()
    return snapshots.weights(numbers[-1]) if numbers else None


def in_pieces(weights: Tensor) -> Iterator[dict[str, Any]]:
    """The messages that bring them to another machine."""
    for piece in weights.split(PIECE_BYTES // 4):
        yield {"kind": "weights", "data": piece.numpy().tobytes()}


def take_weights(directory: Path, piece: str) -> None:
    """On that machine. Raises `OSError`."""
    with open(directory / NAME, "ab") as file:
        file.write(base64.b64decode(piece))
