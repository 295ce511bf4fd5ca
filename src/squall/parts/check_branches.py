"""Whether a model's branches can be parts of a replica."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from squall.parts.branches import entrances, names_by_branch
from squall.splits import Branches
from squall.task import Task, first_batch


def check_branches(task: Task, split: Branches, parts: int) -> str:
    """What runs where, in words. Raises `ValueError` for branches that cannot be parts of a replica."""
    model, known = task.model, dict(task.model.named_modules())
    if missing := [name for name in split.names if name not in known]:
        there = ", ".join(name for name, _ in model.named_children())
        raise ValueError(f"squall.Branches: {missing[0]!r} names no submodule of the model, which has {there}")
    if len(split.names) != parts:
        raise ValueError(
            f"squall.Branches names {len(split.names)} branches, and parts is {parts}: each part has one, so use"
            f" parts={len(split.names)}"
        )
    branches = {id(module) for name in split.names for module in known[name].modules()}
    rest = [module for module in model.modules() if id(module) not in branches]
    _check_apart(model, split, rest)
    _check_called(task, split)
    words = [f"part {part}: {name}, {_elements(known[name]):,} parameters" for part, name in enumerate(split.names)]
    shared = {id(p): p.numel() for module in rest for p in module.parameters(recurse=False)}
    return "\n".join([*words, f"all parts: the rest, {sum(shared.values()):,} parameters"])


def _check_apart(model: nn.Module, split: Branches, rest: list[nn.Module]) -> None:
    names = {id(p): name for name, p in model.named_parameters()}
    owners: dict[str, str] = {names[id(p)]: "the rest" for module in rest for p in module.parameters(recurse=False)}
    for branch, held in zip(split.names, names_by_branch(model, split)):
        for name in held:
            if name in owners:
                raise ValueError(
                    f"squall.Branches: {name} belongs to {branch} and to {owners[name]} of the model: untie it, or"
                    " leave it out of the branches"
                )
            owners[name] = branch


def _check_called(task: Task, split: Branches) -> None:
    """Run the loss on a batch: each branch is called, and returns a tensor."""
    called: set[str] = set()

    def see(branch: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            called.add(branch)
            if not isinstance(output, Tensor):
                raise ValueError(
                    f"squall.Branches: {branch} returns {type(output).__name__}: have it return one tensor, and take it"
                    " apart behind it"
                )

        return hook

    with ExitStack() as stack:
        for branch in split.names:
            for module in entrances(task.model.get_submodule(branch)):
                stack.callback(module.register_forward_hook(see(branch)).remove)
        task.loss(task.model, first_batch(task, task.train))
    if idle := [branch for branch in split.names if branch not in called]:
        raise ValueError(f"squall.Branches: the model never calls {idle[0]}: name what its forward calls")


def _elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
