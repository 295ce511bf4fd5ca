"""How far to go along a direction. A search is a generator: it yields a step, and is sent the loss and slope there.

It returns the step to take, which is always the one that it tried last, or None where there is none to be found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import NamedTuple

DECREASE = 1e-4  # share of the slope's promise that a step must keep
FLATNESS = 0.9  # share of the first slope that may be left
ROUNDING = 2e-7  # of a loss, relative: float32 tells no smaller differences
TRIES = 20

Search = Generator[float, tuple[float, float], float | None]


class _Point(NamedTuple):
    step: float
    loss: float
    slope: float  # of the loss along the direction


def strong_wolfe(loss: float, slope: float, step: float) -> Search:
    """A step that lowers the loss enough and leaves little slope (Nocedal and Wright 2006, algorithms 3.5 and 3.6).

    Close to a minimum losses differ by less than they are rounded: there the slopes decide (Hager and Zhang 2005,
    section 2).

    Args:
        loss: where the search starts.
        slope: of the loss along the direction there, below 0.
        step: to try first.
    """
    start = before = _Point(0.0, loss, slope)
    for _ in range(TRIES):
        point = _Point(step, *(yield step))
        if not _enough(start, point) or point.loss > before.loss + _noise(start):
            return (yield from _zoom(start, before, point))
        if abs(point.slope) <= -FLATNESS * slope:
            return step
        if point.slope >= 0:
            return (yield from _zoom(start, point, before))
        reach = step - before.step
        bottom = _minimum(before, point)
        step = _between(bottom, step + reach, step + 4 * reach) if bottom > step else step + 4 * reach
        before = point
    return before.step  # it fell all the way


def _zoom(start: _Point, low: _Point, high: _Point) -> Search:
    """There is a step between the two; `low` has the lower loss of them, and slopes towards the other.

    Where the slope jumps there may be none flat enough: then the lowest found has to do.
    """
    for _ in range(TRIES):
        width = high.step - low.step
        if abs(width) <= 1e-10 * max(abs(low.step), abs(high.step)):
            break
        ends = sorted((low.step + 0.1 * width, high.step - 0.1 * width))
        step = _between(_minimum(low, high), *ends)
        point = _Point(step, *(yield step))
        if not _enough(start, point) or point.loss > low.loss + _noise(start):
            high = point
            continue
        if abs(point.slope) <= -FLATNESS * start.slope:
            return step
        if point.slope * width >= 0:
            high = low
        low = point
    if low.step == 0:
        return None
    loss, _ = yield low.step  # once more, because the step that is taken is the one tried last
    return low.step if math.isfinite(loss) else None  # a loss that draws numbers may differ


def armijo(loss: float, slope: float, step: float) -> Search:
    """The first of ever shorter steps that lowers the loss enough; arguments as of `strong_wolfe`."""
    start = _Point(0.0, loss, slope)
    for _ in range(TRIES):
        point = _Point(step, *(yield step))
        if math.isfinite(point.loss) and point.loss <= loss + DECREASE * step * slope + _noise(start):
            return step
        excess = point.loss - loss - step * slope
        vertex = -slope * step * step / (2 * excess) if math.isfinite(excess) and excess > 0 else 0.0
        step = _between(vertex, 0.1 * step, 0.5 * step)
    return None


SEARCHES: dict[str, Callable[[float, float, float], Search]] = {"strong_wolfe": strong_wolfe, "armijo": armijo}


def _enough(start: _Point, point: _Point) -> bool:
    if not math.isfinite(point.loss):
        return False
    if point.loss <= start.loss + DECREASE * point.step * start.slope:
        return True
    return point.loss <= start.loss + _noise(start) and point.slope <= (2 * DECREASE - 1) * start.slope


def _noise(start: _Point) -> float:
    return ROUNDING * abs(start.loss)


def _minimum(a: _Point, b: _Point) -> float:
    """Where the cubic through two losses and slopes is lowest; halfway where there is none."""
    halfway = (a.step + b.step) / 2
    if not (math.isfinite(b.loss) and math.isfinite(b.slope)):
        return halfway
    width = b.step - a.step
    mean = 3 * (a.loss - b.loss) / width + a.slope + b.slope
    square = mean * mean - a.slope * b.slope
    if square < 0:
        return halfway
    root = math.copysign(math.sqrt(square), width)
    bottom = b.slope - a.slope + 2 * root
    return b.step - width * (b.slope + root - mean) / bottom if bottom else halfway


def _between(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
