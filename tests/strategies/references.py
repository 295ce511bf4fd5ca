"""What each algorithm is with one replica, as the loop over plain tensors that its paper describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from squall.runtime.seeds import epoch_order
from squall.runtime.store import turn
from squall.task import TaskFunction
from squall.vector import Layout

# own weights, the shards', share of a whole push -> both, afterwards
Exchange = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def local_training(
    task: TaskFunction, optimizer: Callable[..., torch.optim.Optimizer], every: int, exchange: Exchange, epochs: int
) -> Tensor:
    """Own steps, and an exchange after `every` batches and after the last; the shards' weights in the end."""
    torch.manual_seed(0)
    built = task()
    model = built.model
    steps = optimizer(list(model.parameters()))
    centre = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    batches = list(_batches(built, epochs))
    for number, batch in enumerate(batches, 1):
        steps.zero_grad()
        built.loss(model, batch).backward()
        steps.step()
        if number % every == 0 or number == len(batches):
            share = ((number - 1) % every + 1) / every
            own = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            own, centre = exchange(own, centre, share)
            nn.utils.vector_to_parameters(own.clone(), model.parameters())
    return centre


def block_descent(
    task: TaskFunction, optimizer: Callable[..., torch.optim.Optimizer], blocks: int, epochs: int
) -> Tensor:
    """Every batch moves the elements of one block of the vector, in another order of the blocks in every sweep."""
    torch.manual_seed(0)
    built = task()
    layout = Layout.of(built.model, [list(built.model.parameters())])
    units = layout.tail // 16
    bounds = [*(16 * (block * units // blocks) for block in range(blocks)), layout.tail]
    steps = optimizer(list(built.model.parameters()))
    for number, batch in enumerate(_batches(built, epochs), 1):
        steps.zero_grad()
        built.loss(built.model, batch).backward()
        block = turn(number, blocks, "random")
        mask = torch.zeros(layout.length)
        mask[bounds[block] : bounds[block + 1]] = 1
        for parameter, view in zip(layout.parameters_of(built.model), layout.views(mask)):
            parameter.grad *= view
        steps.step()
    return nn.utils.parameters_to_vector(built.model.parameters()).detach()


def _batches(task: Any, epochs: int) -> Iterator[Any]:
    for epoch in range(epochs):
        for indices in epoch_order(0, epoch, len(task.train), task.shuffle).split(task.batch_size):
            yield torch.utils.data.default_collate([task.train[i] for i in indices.tolist()])


def averaged(own: Tensor, centre: Tensor, share: float) -> tuple[Tensor, Tensor]:
    return own, own


def elastic(rate: float) -> Exchange:
    def exchange(own: Tensor, centre: Tensor, share: float) -> tuple[Tensor, Tensor]:
        difference = own - centre
        return own - rate * difference, centre + rate * difference

    return exchange


def outer(optimizer: Callable[..., torch.optim.Optimizer], prorated: bool = True) -> Exchange:
    """DiLoCo: a step of the outer optimizer on the movement of the weights."""
    kept: list[torch.optim.Optimizer] = []
    parameter = nn.Parameter(torch.empty(0))

    def exchange(own: Tensor, centre: Tensor, share: float) -> tuple[Tensor, Tensor]:
        if not kept:
            parameter.data = centre.clone()
            kept.append(optimizer([parameter]))
        parameter.grad = centre - own
        group = kept[0].param_groups[0]
        whole, group["lr"] = group["lr"], group["lr"] * (share if prorated else 1.0)
        kept[0].step()
        group["lr"] = whole
        return parameter.data.clone(), parameter.data.clone()

    return exchange
