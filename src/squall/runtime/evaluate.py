"""The validation loss and the task's metrics, as means over the examples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import nn

from squall.metrics import begin
from squall.runtime.batches import to_device, validation_batches
from squall.task import Task, loss_and_extras
from squall.usercode.blame import note


def evaluate(
    task: Task, model: nn.Module, device: torch.device, *, loss: bool = True, on_batch: Callable[[], None] | None = None
) -> dict[str, float]:
    """{"loss": ..., metric: ...} over `task.validate`; without the loss, if it is not wanted.

    Leaves the model in the mode that it was in.
    """
    assert task.validate is not None
    was_training = model.training
    model.eval()
    losses = {"loss": lambda model, batch: loss_and_extras(task.loss(model, batch))[0].reshape(())} if loss else {}
    begun = {name: begin(name, metric, device) for name, metric in (losses | dict(task.metrics)).items()}
    autocast = torch.autocast(device.type, task.autocast) if task.autocast is not None else contextlib.nullcontext()
    at, what = 0, "the dataset"  # for the exception's note: how far it came, and in whose code
    try:
        with torch.no_grad(), autocast:
            for count, batch in validation_batches(task):
                if on_batch is not None:
                    on_batch()
                moved = to_device(batch, device)
                for name, metric in begun.items():
                    what = "the loss" if name == "loss" else f"metric {name!r}"
                    metric.add(model, moved, count)
                at, what = at + count, "the dataset"
        values = {}
        for name, metric in begun.items():
            what = f"metric {name!r}"
            values[name] = metric.value()
    except Exception as error:
        note(error, f"in {what}, on validation examples from {at} on", evaluating=what, start=at)
        raise
    finally:
        model.train(was_training)
    return values
