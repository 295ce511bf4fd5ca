"""The graph of a task's model, as its loss calls it on one batch, for TensorBoard."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from squall.export.calls import call_in
from squall.keras import KerasModel
from squall.report.keras_graph import layers_as_boxes
from squall.task import Task, first_batch, untouched


def add_model_graph(writer: Any, task: Task) -> None:
    """Write the graph by a `SummaryWriter`; where the model cannot be traced, write a text that says why."""
    try:
        with untouched(task.model), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")  # of the tracer, about what it cannot follow
            called, tensors = _called(task)
            named = layers_as_boxes(task.model.keras, called) if isinstance(task.model, KerasModel) else nullcontext()
            with named:
                writer.add_graph(called, tensors, use_strict_trace=False)
    except Exception as error:  # whatever the user's model, or torch's tracer, raises
        reason = str(error).strip().partition("\n")[0]
        add_no_graph(writer, f"it cannot be traced ({type(error).__name__}: {reason})")


def add_no_graph(writer: Any, why: str) -> None:
    writer.add_text("graph", f"There is no graph of the model: {why}.")


def _called(task: Task) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model as the loss calls it first, and the tensors that it is called with."""
    call = call_in(task, first_batch(task, task.train))
    called = _Called(task.model, call.args, call.kwargs)
    return called, tuple(called.tensors)


class _Called(nn.Module):
    """A model as a function of tensors to tensors, which is all that can be traced."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.arguments: dict[Any, Any] = {**dict(enumerate(args)), **named}

    @property
    def tensors(self) -> list[Tensor]:
        return [value for value in self.arguments.values() if isinstance(value, Tensor)]

    def forward(self, *tensors: Tensor) -> Any:
        given = iter(tensors)
        values = {key: next(given) if isinstance(v, Tensor) else v for key, v in self.arguments.items()}
        args = [value for key, value in values.items() if isinstance(key, int)]
        found = tuple(_tensors(self.model(*args, **{k: v for k, v in values.items() if isinstance(k, str)})))
        return found if len(found) > 1 else found[0]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
