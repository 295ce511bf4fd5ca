"""Gradients that members of a group add up when all of them are there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from squall.runtime.collective.meeting import in_a_line, lost
from squall.runtime.groups import Group
from squall.runtime.mesh_group import MeshGroup

BUCKET = 25 << 18  # elements that are added up at once, while the next are on their way; 25 MiB, as torch has it


class Sum:
    """Where they are added up, in one piece. Each group has its own: what broke an earlier one may still write there.

    Attributes:
        vector: float32 [all elements, and `numbers` more].
        numbers: those, for what else there is to add up.
        gradients: of each parameter, a view.
    """

    def __init__(self, parameters: Sequence[Tensor], numbers: int = 0) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.vector = torch.zeros(sum(sizes) + numbers)
        *pieces, self.numbers = self.vector.split([*sizes, numbers])
        self.gradients = [piece.view_as(parameter) for parameter, piece in zip(parameters, pieces)]

    def bring(self, fresh: Sequence[Tensor | None], share: float) -> None:
        """Put a member's own there, times its share of the examples."""
        for place, gradient in zip(self.gradients, fresh):
            if gradient is None or not share:  # nothing was computed, and a slice may have an older gradient
                place.zero_()
            else:
                torch.mul(gradient, share, out=place)


def add_up(group: Group | MeshGroup | None, *tensors: Tensor) -> str:
    """Over all members; why the group is broken, if it is."""
    if group is None or len(group.members) == 1:
        return ""
    try:
        pieces = (piece for tensor in tensors for piece in tensor.split(BUCKET))
        under_way = [dist.all_reduce(piece, group=group.torch, async_op=True) for piece in pieces]
        for work in under_way:
            work.wait()
    except RuntimeError as error:
        if not lost(error):
            raise
        group.cut()  # at once: those who wait for this process learn of it
        return in_a_line(error)
    return ""
