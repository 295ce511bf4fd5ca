"""Delay compensation: a first-order estimate of the gradient that a stale push would be if computed now."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-7


class Compensation:
    """g + lambda * g^2 * (w - w_then), where g^2 stands for the diagonal of the Hessian.

    With `decay` lambda is divided by the root of a running mean of g^2, element by element.
    Source: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017.
    """

    def __init__(self, strength: float, decay: float | None, parameters: Sequence[Tensor]) -> None:
        self._strength = strength
        self._decay = decay
        self._corrected = [torch.empty_like(parameter) for parameter in parameters]
        self.mean_squares = [torch.zeros_like(p) for p in parameters] if decay is not None else []

    def correct(self, gradients: Sequence[Tensor], now: Sequence[Tensor], then: Sequence[Tensor]) -> list[Tensor]:
        """All arguments are float32, cut alike; the result is good until the next call."""
        for number, (gradient, weights, basis) in enumerate(zip(gradients, now, then)):
            out = torch.mul(gradient, gradient, out=self._corrected[number])
            if self._decay is not None:
                mean_square = self.mean_squares[number].lerp_(out, 1 - self._decay)
                out.div_(mean_square.add(EPSILON).sqrt_())
            out.mul_(weights - basis).mul_(self._strength).add_(gradient)
        return self._corrected
