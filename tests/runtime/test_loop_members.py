"""A member of a group whose gradients a script's loop computes, by itself: what a step makes of what the loop left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import squall
from squall.plan import make_plan
from squall.protocol.effects import JoinGroup, Step
from squall.protocol.events import GroupJoined, StepTaken
from squall.protocol.messages import Factors
from squall.protocol.nodes import Node
from squall.runtime.collective.loop import LoopMember, Stepped
from squall.runtime.job import private_job
from squall.vector import Layout
from tests.rehearsal import normalized
from tests.tasks import LOCAL, regression

ONE = Node("replica", 0)
STEP = Step(1, 0, 0, 16, 16)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[LoopMember]:
    """In a group of one, with momentum."""
    task = regression(normalized)()
    strategy = squall.AllReduce(replicas=1, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    job = private_job(make_plan(strategy, LOCAL), strategy, task, layout, tmp_path)
    found = LoopMember.of(replace(job, scratch=tmp_path), ONE)
    assert isinstance(found.join(JoinGroup(1, (ONE,), ONE, transfer=False, clock=0)), GroupJoined)
    yield found
    found.leave()


def computed(loop: LoopMember, factors: Factors = ()) -> Tensor:
    """The loop has computed a batch; the gradient that it left, in one piece."""
    member = loop.member
    loss = member.backward.differentiate(member.load(STEP))
    loop.stepped = Stepped(loss, 0.0, factors)
    return torch.cat([parameter.grad.flatten() for parameter in member.parameters if parameter.grad is not None])


def weights(loop: LoopMember) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in loop.member.parameters])


def taken(loop: LoopMember, step: Step = STEP) -> StepTaken:
    event = loop.step(step)
    assert isinstance(event, StepTaken)
    return event


def test_a_step_is_made_at_the_rates_that_the_loop_sets_and_the_optimizer_keeps_its_own(loop: LoopMember) -> None:
    before, gradient = weights(loop), computed(loop, (0.25,))
    assert taken(loop).finite
    torch.testing.assert_close(weights(loop), before - 0.025 * gradient)
    assert loop.member.optimizer.param_groups[0]["lr"] == 0.1


def test_a_round_that_all_leave_out_counts_and_moves_nothing(loop: LoopMember) -> None:
    computed(loop)
    taken(loop)
    before = loop.member.vector.clone()
    computed(loop)  # and then skips it, which leaves the model's running means moved
    loop.stepped = None
    left_out = taken(loop, Step(2, 0, 0, 0, 16))
    assert (left_out.finite, math.isnan(left_out.loss), loop.member.clock) == (True, True, 2)
    assert torch.equal(loop.member.vector, before), "not by momentum either"
    buffers = torch.zeros_like(before)
    loop.member.layout.write_buffers(loop.member.backward.on_vector.model, buffers)
    tail = loop.member.layout.tail
    assert torch.equal(buffers[tail:], before[tail:])


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_moves_nothing_and_the_guilty_says_so(loop: LoopMember, where: str) -> None:
    before = loop.member.vector.clone()
    computed(loop)
    if where == "loss":
        loop.stepped = Stepped(math.inf, 0.0, ())
    else:
        gradient = loop.member.parameters[0].grad
        assert gradient is not None
        gradient[0] = math.nan
    found = taken(loop)
    assert (found.finite, found.guilty, loop.member.clock) == (False, True, 0)
    assert torch.equal(loop.member.vector, before)


def test_a_step_that_is_given_up_leaves_the_models_buffers_as_they_were(loop: LoopMember) -> None:
    buffers = list(loop.member.backward.on_vector.model.buffers())
    before = [buffer.clone() for buffer in buffers]
    computed(loop)
    assert not all(map(torch.equal, before, buffers))
    loop.leave()
    assert all(map(torch.equal, before, buffers))
    assert all(parameter.grad is None for parameter in loop.member.parameters)


def test_a_loop_that_propagates_no_loss_back_is_told_so(loop: LoopMember) -> None:
    loop.member.load(STEP)
    with pytest.raises(ValueError, match="gave no gradient"):
        loop.step(STEP)
