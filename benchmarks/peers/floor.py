"""The floor of an exchange: its arithmetic and its one copy, inside one process."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.peers.common import (
    EXCHANGE_LR,
    Gate,
    OptimizerName,
    flat_optimizer,
    launch,
    median_seconds,
)


def exchange_seconds(elements: int, optimizer: OptimizerName, repeats: int) -> float:
    """Median seconds of one fused step on a flat float32 parameter and one copy of it, on one thread."""
    return launch(_work, 1, elements, optimizer, repeats)[0]


def _work(rank: int, gate: Gate, elements: int, optimizer: OptimizerName, repeats: int) -> float:
    parameter = nn.Parameter(torch.zeros(elements))
    parameter.grad = torch.randn(elements)
    fetched = torch.empty(elements)
    server = flat_optimizer(parameter, optimizer, EXCHANGE_LR)

    def exchange() -> None:
        server.step()
        fetched.copy_(parameter.detach())

    return median_seconds(exchange, repeats)
