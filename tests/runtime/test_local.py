"""A replica that trains on its own weights, by itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import squall
from squall.protocol.effects import Compute
from squall.runtime.backward import Backward
from squall.runtime.local import LocalTraining
from squall.vector import Layout
from tests.tasks import regression


def test_a_replica_that_starts_later_in_the_schedule_has_its_rate_and_warns_of_nothing() -> None:
    """Warnings are errors here. Batch 4 of two replicas is step 2 of the schedule."""
    task = regression(schedule=partial(StepLR, step_size=1, gamma=0.5))()
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    recipe = squall.DiLoCo(replicas=2, optimizer=partial(torch.optim.SGD, lr=1.0)).recipe()
    start = torch.zeros(layout.length)
    own = torch.zeros_like(start)
    backward = Backward(task, layout, [own], 0, torch.device("cpu"))
    late = LocalTraining(backward, own, recipe, start, torch.zeros_like(start))
    late.use(0)
    late.compute(Compute(0, 4 * 16, 5 * 16, 0, accumulate=False, local_step=False))
    assert late.backward.on_vector.parameters[-1].item() == pytest.approx(-0.25 * _slope(late))


def _slope(local: LocalTraining) -> float:
    gradient = local.backward.on_vector.parameters[-1].grad
    assert gradient is not None
    return gradient.item()
