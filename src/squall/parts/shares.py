"""What of a replica's vector each of its parts has. It follows from the split, so every process of a run knows it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from squall.parts.branches import names_by_branch
from squall.parts.slices import sliced_dimensions
from squall.parts.stages import chain_of, cut_chain, names_by_part
from squall.splits import Branches, Pipeline, Tensor
from squall.task import Task
from squall.vector import Layout, Slice


class Share(NamedTuple):
    """Of one part."""

    reads: Layout  # what it computes with of the weights
    writes: Layout  # what it answers for: its gradients, its buffers. Those of all parts make up the whole

    @property
    def lacks(self) -> set[str]:
        """What it reads and others write."""
        return set(self.reads.names).difference(self.writes.names)


def shares(task: Task, layout: Layout, starts: Sequence[int], parts: int) -> tuple[Share, ...]:
    """`starts`: where the stages of a pipeline begin. Raises `ValueError` for a task without a split."""
    match task.split:
        case Pipeline() as split:
            stages = cut_chain(chain_of(split, task.model), starts)
            return _by_names(layout, names_by_part(task.model, stages, parts))
        case Branches() as split:
            named = names_by_branch(task.model, split)
            shared = set(layout.names).difference(*named)
            return _by_names(layout, [own | shared for own in named])
        case Tensor() as split:
            return tuple(_sliced(layout, sliced_dimensions(split, task.model), part, parts) for part in range(parts))
    raise ValueError("the task has no split")


def _by_names(layout: Layout, names: Sequence[Collection[str]]) -> tuple[Share, ...]:
    """What several parts compute with, the first of them answers for."""
    return tuple(
        Share(layout.share(own), layout.share(set(own).difference(*names[:part]))) for part, own in enumerate(names)
    )


def _sliced(layout: Layout, dimensions: dict[str, int], part: int, parts: int) -> Share:
    slices = {name: Slice(dimension, part, parts) for name, dimension in dimensions.items()}
    reads = layout.share(layout.names, slices)
    return Share(reads, reads if part == 0 else layout.share(set(slices), slices))
