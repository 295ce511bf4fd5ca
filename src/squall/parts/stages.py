"""A model as a chain of modules, and the chain as stages that take equal time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from squall.parts.microbatches import Call
from squall.splits import Pipeline

REPEATS = 3


class Stage(nn.Module):
    """Consecutive modules of a chain, each called with what the one before returned."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.chain = nn.ModuleList(modules)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self.chain
        if getattr(first, "inplace", False):  # what a stage is given begins a graph, and may not be written to
            args = tuple(value.clone() if isinstance(value, Tensor) else value for value in args)
        output = first(*args, **kwargs)
        for module in others:
            output = follow(module, output)
        return output


def follow(module: nn.Module, output: Any) -> Any:
    """The module's output on what the module before it has returned."""
    return module(*output) if isinstance(output, tuple) else module(output)


def chain_of(split: Pipeline, model: nn.Module) -> list[nn.Module]:
    """The modules that the model calls one after the other."""
    if split.stages is not None:
        chain = list(split.stages(model))
        if not chain or not all(isinstance(module, nn.Module) for module in chain):
            raise ValueError("Pipeline.stages must return modules of the model, such as lambda m: [m.front, m.back]")
        inside = {id(module) for module in model.modules()}
        if foreign := [type(module).__name__ for module in chain if id(module) not in inside]:
            raise ValueError(
                f"Pipeline.stages returned {', '.join(foreign)}, which is no module of the model: make it in the"
                " model's __init__, so that its parameters are the model's"
            )
        return chain
    if isinstance(model, nn.Sequential):
        return list(model)
    raise ValueError(
        f"squall.Pipeline cannot see the stages of a {type(model).__name__}: give stages=lambda m: [m.front, m.back],"
        " the modules that it calls one after the other, or build it as an nn.Sequential"
    )


def seconds_of(chain: Sequence[nn.Module], call: Call) -> list[float]:
    """Of forward and backward of each module on a batch, the least of some; gradients are left nowhere."""
    taken: list[float] = []
    args, kwargs = call
    for number, module in enumerate(chain):
        best = float("inf")
        for _ in range(REPEATS):
            inputs = pytree.tree_map(_leaf, (args, kwargs))
            started = time.perf_counter()
            try:
                output = Stage([module])(*inputs[0], **inputs[1])
            except Exception as error:
                before = (
                    f"what {type(chain[number - 1]).__name__} returns" if number else "what the loss gives the model"
                )
                raise ValueError(
                    f"a stage of squall.Pipeline, {type(module).__name__}, does not take {before}: name the modules in"
                    f" the order in which the model calls them ({error})"
                ) from error
            leaves = [leaf for leaf in pytree.tree_leaves((inputs, [*module.parameters()])) if _wanted(leaf)]
            ends = [leaf for leaf in pytree.tree_leaves(output) if _wanted(leaf)]
            if ends and leaves:
                torch.autograd.grad(ends, leaves, [torch.ones_like(end) for end in ends], allow_unused=True)
            best = min(best, time.perf_counter() - started)
        taken.append(best)
        if number < len(chain) - 1:
            args, kwargs = (output if isinstance(output, tuple) else (output,)), {}
            _check_passed(output, module, chain[number + 1])
    return taken


def balanced(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """Where each stage begins in the chain, so that the slowest takes the least time."""
    least = [0.0]  # of the first n modules in so many stages, the slowest stage's time
    least += [sum(seconds[:n]) for n in range(1, len(seconds) + 1)]
    begins: list[list[int]] = [[0]] * (len(seconds) + 1)
    for stage in range(2, stages + 1):
        found, chosen = [float("inf")] * (len(seconds) + 1), [[0]] * (len(seconds) + 1)
        for stop in range(stage, len(seconds) + 1):
            for start in range(stage - 1, stop):
                slowest = max(least[start], sum(seconds[start:stop]))
                if slowest < found[stop]:
                    found[stop], chosen[stop] = slowest, [*begins[start], start]
        least, begins = found, chosen
    return tuple(begins[-1])


def cut_chain(chain: Sequence[nn.Module], starts: Sequence[int]) -> list[Stage]:
    return [Stage(chain[start:stop]) for start, stop in pairwise([*starts, len(chain)])]


def names_by_part(model: nn.Module, stages: Sequence[nn.Module], parts: int) -> list[set[str]]:
    """The parameters and buffers that each part computes with, by the names that the layout knows.

    Stage i is on part i % parts. What is in no stage is the first part's.
    """
    tensors = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    names: list[set[str]] = [set() for _ in range(parts)]
    for number, stage in enumerate(stages):
        names[number % parts] |= {tensors[id(tensor)] for tensor in (*stage.parameters(), *stage.buffers())}
    names[0] |= set(tensors.values()).difference(*names)
    return names


def _leaf(value: Any) -> Any:
    """The value as the beginning of a graph of its own."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _wanted(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _check_passed(output: Any, module: nn.Module, onto: nn.Module) -> None:
    tensors = output if isinstance(output, tuple) else (output,)
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise ValueError(
            f"{type(module).__name__} passes {type(output).__name__} on to {type(onto).__name__}: between stages go a"
            " tensor or a tuple of tensors"
        )
