"""One process of a replica whose layers are sliced: torch's DTensor, on slices of the replica's one vector."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from squall import splits
from squall.parts.agreement import clip_together, settle
from squall.parts.neighbours import SPEAKER, Neighbours, lost_neighbours
from squall.runtime.inside import Computed, Inside, computing, dense, local
from squall.task import Batch, Task, first_batch, loss_and_extras


class Sliced(Inside):
    """A slice of each layer that the task's split names, and all of the rest. It changes the task's model."""

    looked = True

    def __init__(self, task: Task, neighbours: Neighbours, device: torch.device) -> None:
        assert isinstance(task.split, splits.Tensor)
        self._neighbours, self._device = neighbours, device
        _time_waits(neighbours)
        slice_layers(task.split, task.model, DeviceMesh.from_group(neighbours.torch, device.type))
        self._parameters = dict(task.model.named_parameters())
        self._distributed: list[Any] = [p for p in self._parameters.values() if isinstance(p, DTensor)]

    def compute(self, task: Task, model: nn.Module, batch: Batch, seed: int, into: Sequence[Tensor] | None) -> Computed:
        with lost_neighbours():
            with computing(task, self._device):
                loss, extras = loss_and_extras(task.loss(model, batch))
            loss.backward()
            value = local(loss).item()
            for parameter in self._distributed:  # a sum over the parts may still be put off
                if parameter.grad is not None and parameter.grad.placements != parameter.placements:
                    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        dense([self._parameters[span.name] for span in self.writes.parameters])
        fresh = [local(self._parameters[span.name].grad) for span in self.writes.parameters]
        return settle(self._neighbours, [g for g in fresh if g is not None], value, extras, SPEAKER)

    def clip(self, gradients: Sequence[Tensor], most: float) -> float:
        return clip_together(self._neighbours, gradients, most)

    def agreed(self, value: float) -> float:
        return self._neighbours.agreed(value)[0]


def _time_waits(neighbours: Neighbours) -> None:
    """Count what DTensor waits for in this process. It asks torch's group itself, and waits by this function alone."""
    wait: Callable[[Any], Any] = functional.wait_tensor

    def timed(tensor: Any) -> Any:
        with neighbours.spent.waiting():
            return wait(tensor)

    functional.wait_tensor = timed


def layers_of(split: splits.Tensor, model: nn.Module) -> dict[str, splits.Slicing]:
    """Module names -> how each is sliced. Raises `ValueError` where a pattern names nothing that can be."""
    chosen: dict[str, splits.Slicing] = {}
    kinds = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    for pattern, slicing in split.layers.items():
        found = [name for name in kinds if fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(
                f"squall.Tensor: {pattern!r} names no nn.Linear or nn.Embedding of the model, which has"
                f" {', '.join(list(kinds)[:8]) or 'none'}"
            )
        if both := [name for name in found if chosen.get(name, slicing) != slicing]:
            raise ValueError(f"squall.Tensor: {pattern!r} and another pattern name {both[0]}: give it to one of them")
        chosen |= dict.fromkeys(found, slicing)
    return chosen


def sliced_dimensions(split: splits.Tensor, model: nn.Module) -> dict[str, int]:
    """The names of the parameters that are sliced, and along which dimension. What is not, all parts have alike."""
    found = {}
    for name, slicing in layers_of(split, model).items():
        across = (slicing == "row") == isinstance(model.get_submodule(name), nn.Linear)  # not along the first one
        found[f"{name}.weight"] = int(across)
        if not across and getattr(model.get_submodule(name), "bias", None) is not None:
            found[f"{name}.bias"] = 0
    return found


def slice_layers(split: splits.Tensor, model: nn.Module, mesh: DeviceMesh) -> None:
    """Make the layers' parameters DTensors, each process keeping its slice of what it has."""
    plan: Any = {name: _style(model.get_submodule(name), slicing) for name, slicing in layers_of(split, model).items()}
    parallelize_module(model, mesh, plan, src_data_rank=None)


def _style(module: nn.Module, slicing: splits.Slicing) -> ColwiseParallel | RowwiseParallel:
    if slicing == "row":
        return RowwiseParallel(input_layouts=Replicate() if isinstance(module, nn.Embedding) else None)
    return ColwiseParallel(output_layouts=Replicate() if slicing == "gathered" else None)


def check_slices(task: Task, split: splits.Tensor, parts: int) -> str:
    """What is sliced, in words. Raises `ValueError` for layers that cannot be, or that do not fit one another."""
    model = task.model
    chosen = layers_of(split, model)
    users = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for name, slicing in chosen.items():
        module = model.get_submodule(name)
        what, size = _shared_out(module, slicing)
        if size % parts:
            raise ValueError(
                f"squall.Tensor: {name} has {size} {what}, which {parts} parts do not divide: use as many parts as do,"
                " or leave it out"
            )
        if any(users[id(parameter)] > 1 for parameter in module.parameters()):
            raise ValueError(
                f"squall.Tensor: {name} shares its weights with another module, and cannot be sliced: leave it out, or"
                " untie them"
            )
    _run_sliced(task, chosen, parts)
    return "\n".join(f"sliced in {parts}: {name} ({slicing})" for name, slicing in chosen.items())


def _shared_out(module: nn.Module, slicing: splits.Slicing) -> tuple[str, int]:
    """What of a layer the parts share out, and how much of it there is."""
    if isinstance(module, nn.Linear):
        return ("inputs", module.in_features) if slicing == "row" else ("outputs", module.out_features)
    assert isinstance(module, nn.Embedding)
    return ("rows", module.num_embeddings) if slicing == "row" else ("columns", module.embedding_dim)


def _run_sliced(task: Task, chosen: Mapping[str, splits.Slicing], parts: int) -> None:
    """Run the loss on outputs and inputs of the sizes that they have on each part."""
    with ExitStack() as stack:
        for name, slicing in chosen.items():
            module = task.model.get_submodule(name)
            if slicing == "column":
                stack.callback(module.register_forward_hook(partial(_first_slice, parts)).remove)
            elif slicing == "row" and isinstance(module, nn.Linear):
                stack.callback(module.register_forward_pre_hook(partial(_made_whole, name, parts)).remove)
        try:
            loss_and_extras(task.loss(task.model, first_batch(task, task.train)))
        except Exception as error:
            raise ValueError(
                f"squall.Tensor: with {parts} parts the model does not fit together: {error}. A 'row' layer takes"
                " what a 'column' layer gives, through elementwise functions alone; before anything else use 'gathered'"
            ) from error


def _first_slice(parts: int, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.chunk(parts, -1)[0]


def _made_whole(name: str, parts: int, module: nn.Linear, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    has, takes = inputs[0].shape[-1], module.in_features // parts
    if has != takes:
        raise ValueError(f"{name} takes slices of {takes} inputs, and is given {has}")
    return (inputs[0].repeat(*[1] * (inputs[0].ndim - 1), parts), *inputs[1:])
