"""A run whose loss grows beyond sense says so, and an ordinary one does not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import closing
from functools import partial

import pytest
import torch

import squall
from squall.record.rows import EventRow
from squall.report import Reader
from squall.run import Run
from squall.runtime.divergence import REPORTS, Divergence
from tests.tasks import INLINE, numbers, regression

Fit = Callable[..., Run]


def test_one_bad_report_is_no_divergence_and_a_recovered_run_is_none_any_more() -> None:
    found = Divergence()
    assert not any(found.trained(loss) for loss in (2.3, 2e12, math.nan, *[2.0] * REPORTS))
    told = [found.trained(50.0) for _ in range(REPORTS)]
    assert told.count(True) == 1
    assert "the training loss has grown to 50, and was 2.3 at first" in found.text
    assert any(found.trained(1.0) for _ in range(REPORTS))
    assert found.text == ""


@pytest.mark.parametrize("loss", [math.inf, math.nan, 24.0])
def test_a_validation_loss_beyond_sense(loss: float) -> None:
    found = Divergence(first=2.3)
    assert not found.measured(20.0)  # of a model that knows its examples by heart
    assert found.measured(loss)
    assert "validation loss has grown" in found.text


def test_losses_below_zero_may_rise_as_far_as_they_are_from_it() -> None:
    found = Divergence(first=-2.0)
    assert not found.measured(10.0)
    assert found.measured(17.0)


@pytest.mark.parametrize("losses", [[2.3, 2.4, 2.5], [0.1, 0.5, 0.9]])
def test_a_run_that_ends_no_lower_than_it_began_has_not_learned(losses: list[float]) -> None:
    found = Divergence()
    assert not any(found.trained(loss) for loss in losses)
    assert found.ended()
    assert not Divergence(first=2.3).ended(), "nothing is known of it"


@pytest.mark.parametrize("strategy", [squall.SingleProcess, partial(squall.Downpour, replicas=2)])
def test_an_absurd_learning_rate_is_told_and_a_good_one_is_not(
    inline: Fit, strategy: Callable[..., squall.Strategy]
) -> None:
    task = regression(examples=640, validate=numbers(64), loss=absolute)
    good = inline(task, strategy(optimizer=partial(torch.optim.SGD, lr=0.01)), epochs=8).summary()
    assert good.diverged is None
    run = inline(task, strategy(optimizer=partial(torch.optim.SGD, lr=1e6)), epochs=8)
    found = run.summary()
    assert found.status == "finished"
    assert "loss has grown to" in str(found.diverged)
    assert "smaller learning rate" in str(found)
    assert json.loads(json.dumps(found.to_json_dict()))["diverged"] == found.diverged
    with closing(Reader(run.directory / "run.sqlite")) as reader:
        assert any(event.kind == "diverged" for event in reader.rows(EventRow)), "the progress shows events"
    again = squall.resume(run.directory, epochs=9, settings=INLINE).summary()
    assert "loss has grown to" in str(again.diverged), "what it began with is known from before"


def absolute(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Its gradient stays finite, however far off the model is."""
    return (model(batch[0]) - batch[1]).abs().mean()
