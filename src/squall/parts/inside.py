"""From a task's split to this process's part of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from squall.parts.branches import Branched
from squall.parts.neighbours import SPEAKER, Neighbours
from squall.parts.pipeline import Pipelined
from squall.parts.shares import shares
from squall.parts.slices import Sliced
from squall.runtime.inside import Inside
from squall.splits import Branches, Pipeline, Tensor
from squall.task import Task
from squall.vector import Layout


def inside(
    task: Task, layout: Layout, starts: Sequence[int], neighbours: Neighbours, device: torch.device
) -> Inside:  # fmt: skip
    """What this part computes. It changes the task's model: to be called once, in the part's own process."""
    built = [parameter.data for parameter in task.model.parameters()]
    parts = shares(task, layout, starts, neighbours.parts)
    match task.split:
        case Pipeline():
            place: Inside = Pipelined(task, parts, starts, neighbours, device)
        case Tensor():
            place = Sliced(task, neighbours, device)
        case Branches():
            place = Branched(task, neighbours, device)
    place.reads, place.writes = parts[neighbours.part]
    place.built, place.speaks, place.neighbours = built, neighbours.part == SPEAKER, neighbours
    return place
