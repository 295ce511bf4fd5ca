"""What a run asks Ray for: the processors of each of its machines."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple


class Share(NamedTuple):
    """What is free on a node of a cluster, or what a machine of a run gets."""

    cpus: int
    gpus: int = 0


def shares(
    cpus: int, here: Share, nodes: Sequence[Share], machines: int | None = None, cores: int | None = None,
    on_gpus: bool = False,
) -> list[Share]:  # fmt: skip
    """Of each machine of a run, the launching one's first.

    Args:
        cpus: that the replicas need together.
        here: free on the launching machine.
        nodes: free on each of the others.
        machines: how many are wanted; None: as many as have those, or all.
        cores: of each machine; None: its part of those.
        on_gpus: replicas are where there are GPUs.
    """
    if on_gpus:
        here, nodes = here if here.gpus else Share(0), [node for node in nodes if node.gpus]
        own, *others = shares(cpus, here, nodes, machines, cores)
        return [own, *(share._replace(gpus=max(1, share.gpus)) for share in others)]
    if machines is None:
        return _needed(cpus, here, nodes, cores)
    own = _cut(here, cores or ceil(cpus / machines))
    each = cores or max(1, ceil((cpus - own.cpus) / max(1, machines - 1)))
    gpus = max((node.gpus for node in nodes), default=0)
    return [own, *[Share(each, min(each, gpus))] * (machines - 1)]


def _needed(cpus: int, here: Share, nodes: Sequence[Share], cores: int | None) -> list[Share]:
    """The nodes with most that is free; where nothing is free now, a machine that has all may come."""
    found = [_cut(here, cores or cpus)]
    for node in sorted(nodes, key=lambda node: (node.gpus, node.cpus), reverse=True):
        missing = cpus - sum(share.cpus for share in found)
        if missing > 0 and node.cpus >= (cores or 1):
            found.append(_cut(node, cores or missing))
    if not any(share.cpus for share in found):
        found.append(Share(cores or cpus))
    return found


def _cut(free: Share, cpus: int) -> Share:
    cpus = min(free.cpus, cpus)
    return Share(cpus, min(free.gpus, cpus))
