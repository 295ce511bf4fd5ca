"""From a task's split to this process's part of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from squall.parts.branches import Branched
from squall.parts.neighbours import SPEAKER, Neighbours
from squall.parts.pipeline import Pipelined
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
    place = _place(task, layout, starts, neighbours, device)
    place.built, place.speaks, place.neighbours = built, neighbours.part == SPEAKER, neighbours
    return place


def _place(
    task: Task, layout: Layout, starts: Sequence[int], neighbours: Neighbours, device: torch.device
) -> Inside:  # fmt: skip
    match task.split:
        case Pipeline():
            return Pipelined(task, layout, starts, neighbours, device)
        case Tensor():
            return Sliced(task, layout, neighbours, device)
        case Branches():
            return Branched(task, layout, neighbours, device)
    raise AssertionError(f"no part of {task.split!r}")
