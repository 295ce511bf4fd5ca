"""What a replica does to the memory that it shares."""

from __future__ import annotations

import torch

from squall.protocol.effects import Compute
from squall.runtime.arena import Arena, Shape
from squall.runtime.backward import Backward
from squall.runtime.compute import Gradients
from squall.vector import Layout
from tests.tasks import regression


def test_a_replacement_leaves_what_its_predecessor_pushed_until_it_pushes_itself() -> None:
    """A shard may not have read it yet: the slot is the newcomer's only once every shard has seen the view."""
    task = regression()()
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    arena = Arena.private(Shape(layout.length, 1))
    pushed = torch.arange(1.0, layout.length + 1)
    arena.gradient(0, 0).copy_(pushed)
    backward = Backward(task, layout, [arena.weights(0, 0)], 0, torch.device("cpu"))
    newcomer = Gradients(backward, [arena.gradient(0, 0)], [arena.rates(0, 0)])
    newcomer.use(0)
    assert torch.equal(arena.gradient(0, 0), pushed)
    newcomer.compute(Compute(0, 0, task.batch_size, 0, accumulate=False, local_step=False))
    assert not torch.equal(arena.gradient(0, 0), pushed)
