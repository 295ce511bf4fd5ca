"""Where in the computation of a batch a NaN or Inf comes from."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from squall.protocol.effects import Compute
from squall.protocol.nodes import Node
from squall.runtime.backward import Backward
from squall.task import Batch


@dataclass(frozen=True)
class NonFiniteBatch:
    """A batch whose gradient was not finite.

    Attributes:
        replica: that computed it.
        epoch: of the batch.
        start: first example of the epoch's order.
        stop: behind the last.
        loss: of the batch; None if a script did not tell it.
        parameters: name -> how many elements of its gradient are NaN or infinite, of those that have any.
        module: the first whose output was not finite; "" if there was none.
        inputs_finite: what that module was given was finite.
        batch: as the loss got it.
        model: with the weights that the replica had, in training mode.
    """

    replica: str
    epoch: int
    start: int
    stop: int
    loss: float | None
    parameters: dict[str, int]
    module: str
    inputs_finite: bool
    batch: Batch = field(repr=False)
    model: nn.Module = field(repr=False)

    def __str__(self) -> str:
        lines = [
            f"{self.replica} computed a gradient that is not finite on examples {self.start} to {self.stop}"
            f" of epoch {self.epoch}; the loss is {'not told' if self.loss is None else f'{self.loss:g}'}"
        ]
        if self.module:
            given = "finite inputs" if self.inputs_finite else "inputs that are not finite either"
            lines.append(f"first output that is not finite: of {self.module}, on {given}")
        elif self.loss is not None and math.isfinite(self.loss):
            lines.append("the outputs of all modules and the loss are finite")
        else:
            lines.append("the outputs of all modules are finite: the NaN or Inf is made in the loss")
        lines += [f"gradient of {name}: {count} elements" for name, count in self.parameters.items()]
        return "\n".join(lines)


class Examination:
    """Watches the computation of one batch: made just before it, and ended by `end`."""

    def __init__(self, node: Node, effect: Compute, backward: Backward, batch: Batch) -> None:
        self._node, self._effect, self._backward, self._batch = node, effect, backward, batch
        model = backward.on_vector.model
        self._as_it_was = copy.deepcopy(model)
        for parameter in self._as_it_was.parameters():
            parameter.data = parameter.data.clone()  # else each keeps a copy of the whole buffer that it is a view into
        self._found: list[tuple[str, bool]] = []  # the first module with such an output; whether its inputs were finite
        self._hooks = [
            module.register_forward_hook(partial(self._watch, name)) for name, module in model.named_modules()
        ]

    def _watch(self, name: str, module: nn.Module, given: Any, output: Any) -> None:
        if not self._found and not _finite(output):
            kind = type(module).__name__
            self._found.append((f"{name} ({kind})" if name else kind, _finite(given)))

    def end(self, loss: float | None) -> NonFiniteBatch:
        """What was seen. Called when the gradients are there."""
        for hook in self._hooks:
            hook.remove()
        effect, backward = self._effect, self._backward
        gradients = zip(backward.layout.parameters, backward.on_vector.parameters)
        spoilt = {span.name: _spoilt(p.grad) for span, p in gradients if p.grad is not None}
        module, inputs_finite = self._found[0] if self._found else ("", True)
        return NonFiniteBatch(
            str(self._node), effect.epoch, effect.start, effect.stop, loss,
            {name: count for name, count in spoilt.items() if count}, module, inputs_finite, self._batch,
            self._as_it_was,
        )  # fmt: skip


def examine(node: Node, effect: Compute, backward: Backward) -> NonFiniteBatch:
    """Compute a batch under observation."""
    batch = backward.load(effect)
    examination = Examination(node, effect, backward, batch)
    return examination.end(backward.differentiate(batch))


def _spoilt(gradient: Tensor) -> int:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return int((~dense.isfinite()).sum())


def _finite(value: Any) -> bool:
    """Whether all floating tensors in a nested value are finite."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    return True
