"""What a task calls its model with, found by running its loss: the user declares no inputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset, Subset

from squall.task import Batch, Task


@dataclass(frozen=True)
class Call:
    """Arguments of a model, in the order of its signature."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, also those inside of lists and dicts, in the order of an exported model's inputs."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def of(self, model: nn.Module) -> Any:
        with torch.no_grad():
            return model(*self.args, **self.kwargs)


class _Called(Exception):
    """Carries a call out of the loss, which need not go on."""

    def __init__(self, call: Call) -> None:
        self.call = call


def call_in(task: Task, batch: Batch) -> Call:
    """The first call of the model in the task's loss of this batch. Raises `ValueError` where there is none."""
    signature = inspect.signature(task.model.forward)

    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        # torch.export stumbles over a None in `**kwargs`.
        given = {name: value for name, value in kwargs.items() if value is not None or name in signature.parameters}
        bound = signature.bind(*args, **given)
        # A view's strides would be taken for a condition on all inputs.
        raise _Called(Call(*tree_map_only(Tensor, Tensor.contiguous, (bound.args, bound.kwargs))))

    handle = task.model.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        with torch.no_grad():
            task.loss(task.model, batch)
    except _Called as caught:
        tensors = caught.call.tensors
        if tensors and tensors[0].ndim:
            return caught.call
        raise ValueError("Task.loss calls the model without a batch: give it tensors [batch, ...]") from None
    finally:
        handle.remove()
    raise ValueError(
        "Task.loss does not call the model itself (`model(...)`), but something in it, so there is no one function that"
        " is the model: let the model's forward do what the loss needs"
    )


def examples_of(task: Task) -> Dataset[Any]:
    """Those that an export is tried with: of the validation set, else of the training set."""
    return task.train if task.validate is None else task.validate


def batch_of(task: Task, data: Dataset[Any], indices: Iterable[int]) -> Batch:
    """One collated batch of these examples, counted round where there are fewer."""
    total = len(cast(Sized, data))
    chosen = Subset(data, [index % total for index in indices])
    collate = {name: value for name, value in task.loader.items() if name == "collate_fn"}
    return next(iter(DataLoader(chosen, batch_size=len(chosen), **collate)))


def call_with(task: Task, examples: int) -> Call:
    """A call with the first so many examples."""
    return call_in(task, batch_of(task, examples_of(task), range(examples)))


def spread_calls(task: Task, data: Dataset[Any], examples: int, size: int) -> Iterator[Call]:
    """Calls with `size` examples each, taken evenly from all over the data, until there are so many examples."""
    total = len(cast(Sized, data))
    count = min(examples, total)
    indices = [number * total // count for number in range(count)]
    for start in range(0, count, size):
        yield call_in(task, batch_of(task, data, indices[start : start + size]))


def free_shapes(model: nn.Module, one: Call, other: Call) -> Any:
    """The dimensions of `one` that a batch decides, as `torch.export` takes them.

    They are those that are others in `other`, which has another number of examples.

    Raises `ValueError` where the two differ in something else than shapes.
    """
    shapes = ShapesCollection()
    mine, theirs = (tree_leaves((call.args, call.kwargs)) for call in (one, other))
    for leaf, there in zip(mine, theirs, strict=True):
        if isinstance(leaf, Tensor):
            sizes = enumerate(zip(leaf.shape, there.shape, strict=True))
            shapes[leaf] = {dim: Dim.DYNAMIC for dim, (here, differs) in sizes if here != differs}
        elif leaf != there:
            raise ValueError(
                f"Task.loss calls the model with {leaf!r} for one batch and {there!r} for another: an exported model"
                " takes tensors alone, so let it find that in them"
            )
    return shapes.dynamic_shapes(model, one.args, one.kwargs)
