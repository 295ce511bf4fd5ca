"""A replica with an optimizer of its own, in parts: each steps on its pieces of the weights that they share."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import squall
from squall.protocol.effects import End, Keep, PreparePush, UseWeights
from squall.runtime.driver import Host
from squall.runtime.job import Job
from tests import deep
from tests.parts.replica import apart, compute, replica
from tests.tasks import numbers


def summed(model: nn.Module, batch: Any) -> Tensor:
    return ((model(batch[0]).sum(1, keepdim=True) - batch[1]) ** 2).mean()


OPTIMIZER = partial(torch.optim.AdamW, lr=0.01)


class Model(nn.Module):
    """Chained, sliced or branched; a weight in two stages, and a buffer that moves.

    No bias before BatchNorm: its gradient is rounding alone, of which AdamW makes whole steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.again, self.wide, self.tanh, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
        self.again.weight = self.up.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.tanh(self.wide(self.again(self.down(self.norm(self.up(inputs)))))))


def exchanges(host: Host, job: Job) -> tuple[Tensor, Tensor]:
    """Three rounds of batches; the weights that come next are a little off what was pushed. What was pushed last."""
    fetched, pushed = job.arena.weights(0, 0), job.arena.gradient(0, 0)
    for number in range(3):
        host.perform(UseWeights(0), 0.0)
        for batch in range(4):
            host.perform(compute(job.task, 4 * number + batch), 0.0)
        host.perform(PreparePush(0), 0.0)
        fetched.mul_(0.9)
    host.perform(End("finished"), 0.0)
    return pushed.clone(), fetched


SPLITS = [
    (squall.Pipeline(lambda m: [m.up, m.norm, m.down, m.again, m.wide, m.tanh, m.head], 1, "gpipe"), (0, 3)),
    (squall.Branches("down", "head"), ()),
    (squall.Tensor({"down": "gathered", "wide": "column", "head": "row"}), ()),
]


LOCAL_STEPS = [
    squall.Averaging(replicas=1, every=4, optimizer=OPTIMIZER),
    squall.ElasticAveraging(replicas=1, every=4, optimizer=OPTIMIZER),
    squall.DiLoCo(replicas=1, inner_steps=4, optimizer=OPTIMIZER),
]


@pytest.mark.parametrize(
    ("split", "starts", "strategy"),
    deep.sweep([(*split, strategy) for split in SPLITS for strategy in LOCAL_STEPS], 3),
)
def test_parts_push_what_one_process_pushes(split: Any, starts: Any, strategy: Any) -> None:
    def task() -> squall.Task:
        torch.manual_seed(3)
        return squall.Task(model=Model(), loss=summed, train=numbers(96), batch_size=16, split=split)

    (alone, _), (together, _) = (replica(task(), parts, exchanges, starts, strategy) for parts in (1, 2))
    assert apart(together, alone) < 1e-4
    assert alone.any()


@pytest.mark.parametrize(("split", "starts"), SPLITS)
def test_parts_sum_the_portions_that_one_process_sums(split: Any, starts: Any) -> None:
    def portions(host: Host, job: Job) -> Tensor:
        host.perform(UseWeights(0), 0.0)
        for number, weight in enumerate((0.5, 0.25, 2.0)):
            host.perform(msgspec.structs.replace(compute(job.task, number), buffer=-1), 0.0)
            if number != 1:
                host.perform(Keep(0, weight, accumulate=number > 0), 0.0)
        host.perform(End("finished"), 0.0)
        return job.arena.gradient(0, 0).clone()

    def task() -> squall.Task:
        torch.manual_seed(3)
        return squall.Task(model=Model(), loss=summed, train=numbers(96), batch_size=16, split=split)

    strategy = squall.Sandblaster(replicas=1)
    alone, together = (replica(task(), parts, portions, starts, strategy) for parts in (1, 2))
    assert apart(together, alone) < 1e-6
    assert alone.any()
