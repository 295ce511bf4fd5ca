"""The call of a model is found by running its loss, and the batch's dimension by two of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from squall.export.calls import call_with, free_shapes, spread_calls
from tests.export.models import classes, features, tokens_task


def test_arguments_are_put_into_the_signature_s_order() -> None:
    call = call_with(tokens_task(), 3)
    assert [list(tensor.shape) for tensor in call.tensors] == [[3, 5], [3, 5]]
    assert len(call.args) == 1
    assert list(call.kwargs) == ["mask"]


def test_the_first_of_several_calls_counts_and_the_model_is_as_before() -> None:
    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return (model(batch[0][:, :, None].transpose(1, 2)[:, 0]) - model(batch[0] * 2)).mean()

    task = classes(features(), loss=loss)
    call = call_with(task, 4)
    assert torch.equal(call.args[0], features()[:4])
    assert call.args[0].is_contiguous()
    assert task.model(features()).shape == (80, 4)  # no hook is left


def test_a_small_dataset_is_counted_round() -> None:
    assert torch.equal(call_with(classes(features(3)), 5).args[0], features(3)[[0, 1, 2, 0, 1]])


def test_calls_come_from_all_over_the_data() -> None:
    task = classes(features(80))
    calls = list(spread_calls(task, task.train, examples=10, size=4))
    assert [len(call.args[0]) for call in calls] == [4, 4, 2]
    assert torch.equal(torch.cat([call.args[0] for call in calls]), features(80)[::8])


def test_dimensions_that_two_batches_differ_in_are_free() -> None:
    task = tokens_task()
    shapes = free_shapes(task.model, call_with(task, 5), call_with(task, 7))
    assert shapes == {"tokens": {0: Dim.DYNAMIC}, "mask": {0: Dim.DYNAMIC}}


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, batch: model[3].weight.sum(), "does not call the model itself"),
        (lambda model, batch: model(None), "without a batch"),
    ],
)
def test_a_loss_without_a_call_is_refused(loss: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call_with(classes(features(), loss=loss), 2)


def test_a_number_that_goes_by_the_batch_is_refused() -> None:
    task = tokens_task()
    task = replace(task, loss=lambda model, batch: model(batch["text"], len(batch["text"]), mask=batch["mask"]))
    with pytest.raises(ValueError, match="with 5 for one batch and 7 for another"):
        free_shapes(task.model, call_with(task, 5), call_with(task, 7))
