"""What the parts of a replica agree on when each has its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from squall.parts.neighbours import SPEAKER, Found, NeighbourLost, Neighbours
from squall.runtime.inside import Computed, scale
from squall.task import MOST_EXTRAS_BYTES
from squall.transports.texts import printable


def settle(
    neighbours: Neighbours, gradients: Sequence[Tensor], loss: float, extras: dict[str, float] | None, teller: int,
    at_the_end: bool = False,
) -> Computed:  # fmt: skip
    """The batch's loss, or NaN where some gradient is not finite, on all parts; the numbers beside it on part 0.

    `teller` is the part that has computed the loss. `at_the_end`: what the others do next does not depend on it,
    so they say what they have when they are done, and do not wait. Where they agree on more (`Neighbours.later`), each
    keeps what it has found.
    """
    telling, first = neighbours.part == teller, neighbours.part == SPEAKER
    text = msgspec.msgpack.encode(extras) if telling and not first and extras is not None else b""
    values = loss if telling else 0.0, sum(gradient.sum().item() for gradient in gradients), float(len(text))
    if neighbours.later:
        neighbours.found = Found(values, text, extras if telling else None, teller)
        return values[0], None
    if at_the_end and not first:
        neighbours.put_off(*values, text=text)
        return 0.0, None
    if at_the_end:
        loss, seen, length = (ours + theirs for ours, theirs in zip(values, neighbours.all_done()))
    else:
        loss, seen, length = neighbours.agreed(*values)
        if text:
            neighbours.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), SPEAKER)
    if length > 0 and first:
        extras = _received(neighbours, length, teller)
    return (loss if math.isfinite(seen) else math.nan), extras


def extras_of(neighbours: Neighbours, found: Found, length: float) -> dict[str, float] | None:
    """The numbers beside the loss, on part 0. `length` is the sum of what the parts have said of theirs."""
    if found.text:
        neighbours.send(torch.frombuffer(bytearray(found.text), dtype=torch.uint8), SPEAKER)
    if length > 0 and neighbours.part == SPEAKER:
        return _received(neighbours, length, found.teller)
    return found.extras


def _received(neighbours: Neighbours, length: float, teller: int) -> dict[str, float]:
    """The names as they may be shown. Raises `NeighbourLost` for what are no such numbers."""
    if length > MOST_EXTRAS_BYTES:
        raise NeighbourLost(f"parts of this replica say that the numbers beside the loss take {length} bytes")
    received = neighbours.receive(torch.empty(int(length), dtype=torch.uint8), teller)
    try:
        found: dict[str, float] = msgspec.msgpack.decode(received.numpy().tobytes(), type=dict[str, float])
    except msgspec.MsgspecError as error:
        raise NeighbourLost(f"part {teller} says what are no numbers beside the loss: {error}") from error
    return {printable(name, kept=""): value for name, value in found.items()}


def squares_of(gradients: Sequence[Tensor]) -> float:
    """The square of their 2-norm; a part may have none."""
    norms = torch._foreach_norm(list(gradients)) if gradients else []
    return sum(norm.item() ** 2 for norm in norms)


def clip_together(neighbours: Neighbours, gradients: Sequence[Tensor], most: float) -> float:
    """Scale the gradients of all parts down to this 2-norm; the norm they had."""
    (squares,) = neighbours.agreed(squares_of(gradients))
    norm = math.sqrt(squares)
    scale(gradients, most, torch.tensor(norm))
    return norm
