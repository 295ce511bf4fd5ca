"""What the parts of a replica agree on when each has its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from squall.parts.neighbours import SPEAKER, Neighbours
from squall.runtime.inside import Computed, scale


def settle(
    neighbours: Neighbours, gradients: Sequence[Tensor], loss: float, extras: dict[str, float] | None, teller: int
) -> Computed:  # fmt: skip
    """The batch's loss, or NaN where some gradient is not finite, on all parts; the numbers beside it on part 0.

    `teller` is the part that has computed the loss.
    """
    telling = neighbours.part == teller
    text = msgspec.msgpack.encode(extras) if telling and extras is not None and teller != SPEAKER else b""
    seen = sum(gradient.sum().item() for gradient in gradients)
    loss, seen, length = neighbours.agreed(loss if telling else 0.0, seen, len(text))
    if text:
        neighbours.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), SPEAKER)
    elif length > 0 and neighbours.part == SPEAKER:
        received = neighbours.receive(torch.empty(int(length), dtype=torch.uint8), teller)
        extras = msgspec.msgpack.decode(received.numpy().tobytes(), type=dict[str, float])
    return (loss if math.isfinite(seen) else math.nan), extras


def clip_together(neighbours: Neighbours, gradients: Sequence[Tensor], most: float) -> float:
    """Scale the gradients of all parts down to this 2-norm; the norm they had."""
    norms = torch._foreach_norm(list(gradients)) if gradients else []
    (squares,) = neighbours.agreed(sum(norm.item() ** 2 for norm in norms))
    norm = math.sqrt(squares)
    scale(gradients, most, torch.tensor(norm))
    return norm
