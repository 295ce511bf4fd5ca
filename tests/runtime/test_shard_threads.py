"""No bit of what a shard computes depends on the number of its threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from squall.runtime.optimizers import build_optimizer

ELEMENTS = 2_000_000  # enough for torch to divide


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "factory",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        partial(torch.optim.Adagrad, lr=0.1),
        partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
        partial(torch.optim.RMSprop, lr=0.1, centered=True, momentum=0.9),
    ],
)
def test_an_update_has_the_same_bits_with_any_number_of_threads(
    factory: Callable[..., Optimizer], threads: Callable[[int], None]
) -> None:
    chance = torch.Generator().manual_seed(1)
    initial = torch.randn(ELEMENTS + 13, generator=chance)
    gradients = torch.randn(3, ELEMENTS + 13, generator=chance)
    found = []
    for number in (1, 2, 3):
        threads(number)
        weights = nn.Parameter(initial.clone())
        optimizer = build_optimizer(factory, [{"params": [weights]}])
        for gradient in gradients:
            weights.grad = gradient.clone()
            optimizer.step()
        found.append(weights.detach())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
