"""Whether an exported model is still the trained one: both run on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from squall.errors import SquallError
from squall.export.calls import Call

# Float32 has 24 bits, and a sum of thousands in another order, over dozens of layers, loses some seven of them. An
# operator that means something else is off by far more.
ALLOWED = 1e-4  # of an output's largest magnitude


def difference(model: nn.Module, exported: Callable[..., Any], calls: Sequence[Call]) -> float:
    """The biggest difference of an output, as a part of that output's largest magnitude (of integers: 0).

    Raises:
        SquallError: it is more than `ALLOWED`; the message says how much, and for how many examples.
    """
    worst = 0.0
    for call in calls:
        with torch.no_grad():
            expected, found = _tensors(call.of(model)), _tensors(exported(*call.args, **call.kwargs))
        off = max(map(_off, expected, found)) if len(expected) == len(found) > 0 else float("inf")
        if off > ALLOWED:
            raise SquallError(_wrong(model, call, off))
        worst = max(worst, off)
    return worst


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _off(expected: Tensor, found: Tensor) -> float:
    """0 where all is equal, NaN and infinity included; infinity where shapes, integers or kinds differ."""
    if expected.shape != found.shape or expected.dtype.is_floating_point != found.dtype.is_floating_point:
        return float("inf")
    same = (expected == found) | (expected.isnan() & found.isnan())
    if same.all():
        return 0.0
    if not expected.is_floating_point():
        return float("inf")
    scale = expected[expected.isfinite()].abs().max() if expected.isfinite().any() else torch.tensor(0.0)
    off = float((expected - found)[~same].abs().max() / scale.clamp_min(1e-30))
    return off if off == off else float("inf")


def _wrong(model: nn.Module, call: Call, off: float) -> str:
    first, again = _tensors(call.of(model)), _tensors(call.of(model))
    why = (
        "the model is not the same function twice (it draws by chance in evaluation mode, or counts): make it one"
        if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, again))
        else "an operator means something else there, or shapes were taken for constants"
    )
    examples = call.tensors[0].shape[0]
    return (
        f"the exported model is not the trained one: for {examples} examples its outputs differ by {off:.2g} of the"
        f" largest ({ALLOWED:g} is allowed), so nothing was written: {why}"
    )
