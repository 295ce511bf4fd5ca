"""A collated batch in microbatches, and the model's call in the user's loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from squall.task import Batch

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of the model


class _Given(BaseException):
    """Ends a loss function whose model's arguments are known: none of its own handlers is meant."""


def in_pieces(batch: Batch, rows: int) -> list[tuple[int, Batch]]:
    """A batch in pieces of so many examples, the last with what is left; and how many each has.

    A piece has those rows of the batch's tensors, and those entries of its lists of other things.
    """
    leaves, form = pytree.tree_flatten(batch, is_leaf=_is_list_of_things)
    sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}
    if len(sizes) != 1:
        raise ValueError(
            f"squall.Pipeline cuts batches into microbatches, and this one's tensors have {sorted(sizes) or 'no'} rows:"
            " have collate_fn give each tensor one row an example"
        )
    (examples,) = sizes
    cut = [_has_rows(leaf, examples) for leaf in leaves]
    pieces = []
    for start in range(0, examples, rows):
        stop = min(start + rows, examples)
        own = [leaf[start:stop] if rowed else leaf for leaf, rowed in zip(leaves, cut)]
        pieces.append((stop - start, pytree.tree_unflatten(own, form)))
    return pieces


def _has_rows(leaf: Any, examples: int) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.ndim > 0
    return isinstance(leaf, list | tuple) and len(leaf) == examples


def _is_list_of_things(value: Any) -> bool:
    held = isinstance(value, list | tuple) and len(value) > 0
    return held and not any(isinstance(entry, Tensor | list | tuple | dict) for entry in value)


def shapes(batch: Batch) -> tuple[Any, ...]:
    """Two batches for which this is the same have activations of the same shapes."""
    leaves = pytree.tree_leaves(batch)
    return tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x) for x in leaves)


@contextmanager
def _calling(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The model's call is another function's."""
    before = vars(model).get("forward")
    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if before is not None:
            model.forward = before


def given(loss: Callable[[nn.Module, Batch], Any], model: nn.Module, batch: Batch) -> Call:
    """What the loss function calls the model with."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        call.append((args, kwargs))
        raise _Given

    call: list[Call] = []
    try:
        with _calling(model, forward):
            loss(model, batch)
    except _Given:
        return call[0]
    raise ValueError(
        "Task.loss never calls its model, which squall.Pipeline cuts into stages: call model(...) once, or train"
        " without parts"
    )


def taken(loss: Callable[[nn.Module, Batch], Any], model: nn.Module, batch: Batch, output: Any) -> Any:
    """What the loss function returns where the model has returned this."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if called:
            raise ValueError(
                "Task.loss calls its model twice: with squall.Pipeline it may once, because the stages are at another"
                " microbatch by then; put both calls into the model's forward, or train without parts"
            )
        called.append(True)
        return output

    called: list[bool] = []
    with _calling(model, forward):
        return loss(model, batch)
