"""An optimizer's state as a snapshot has it: of shards by element, of replicas without shards by parameter.

What has one value for each element is brought into the one form, so that a run goes on from either.

    weights                      float32 [length]
    GROUP:KEY                    [length], of which the group's elements count, or a scalar of the group
    state:PARAMETER:KEY          of one parameter, in whatever shape
    settings:GROUP:KEY           a number that the optimizer has changed in a param group
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import torch
from torch import Tensor

from squall.vector import Layout, Span

STATE, SETTINGS = "state", "settings"


def put_together(state: Mapping[str, Tensor], first: int, last: int, length: int, tensors: dict[str, Tensor]) -> None:
    """Put what the shard of elements [first, last) holds into tensors of the whole vector, which has `length`."""
    tensors.setdefault("weights", torch.zeros(length))[first:last] = state["weights"]
    for name, value in state.items():
        if name == "weights":
            continue
        if name.startswith((f"{STATE}:", f"{SETTINGS}:")):
            tensors[name] = value
            continue
        group, start, _, key = name.split(":", 3)
        if value.ndim == 0:
            tensors[f"{group}:{key}"] = value
        else:
            _place(tensors, f"{group}:{key}", value, int(start), length)


def by_element(tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """The same, where all parameters of a group have a value for each element in a vector of the group."""
    spans, found, odd = {span.name: span for span in layout.parameters}, dict(tensors), set[str]()
    states = [
        (name, *name.removeprefix(f"{STATE}:").rsplit(":", 1)) for name in tensors if name.startswith(f"{STATE}:")
    ]
    whole = {name: f"{group_of(spans[owner], layout)}:{key}" for name, owner, key in states}
    for name, owner, key in states:
        if tensors[name].shape != (() if key == "step" else spans[owner].shape):
            odd.add(whole[name])
    for name, owner, key in states:
        if whole[name] in odd:
            continue
        value = found.pop(name)
        if key == "step":
            found[whole[name]] = value
        else:
            _place(found, whole[name], value.flatten(), spans[owner].start, layout.length)
    return found


def group_of(span: Span, layout: Layout) -> int:
    """The param group of a parameter."""
    return bisect_right(layout.group_starts, span.start) - 1


def _place(tensors: dict[str, Tensor], name: str, value: Tensor, start: int, length: int) -> None:
    if name not in tensors:
        tensors[name] = torch.zeros(length, dtype=value.dtype)
    tensors[name][start : start + len(value)] = value
