"""How far to go: steps that satisfy the conditions, and clear failures."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.protocol.sandblaster.line_search import DECREASE, FLATNESS, SEARCHES, TRIES, armijo, strong_wolfe

Curve = Callable[[float], tuple[float, float]]  # step -> loss, slope


def search(kind: str, curve: Curve, first: float = 1.0) -> tuple[float | None, list[float]]:
    """The step found, and those tried."""
    tried = []
    generator = SEARCHES[kind](*curve(0.0), first)
    step = next(generator)
    try:
        while True:
            tried.append(step)
            step = generator.send(curve(step))
    except StopIteration as over:
        return over.value, tried


def parabola(at: float) -> Curve:
    return lambda x: ((x - at) ** 2, 2 * (x - at))


def wavy(x: float) -> tuple[float, float]:
    """Falls into several valleys (More and Thuente 1994 try such ones)."""
    return -x / (1 + x * x) + 0.05 * math.sin(7 * x), (x * x - 1) / (1 + x * x) ** 2 + 0.35 * math.cos(7 * x)


def steep(x: float) -> tuple[float, float]:
    """Not a number beyond 3, as a loss that overflows."""
    return (math.cosh(2 * (x - 1)), 2 * math.sinh(2 * (x - 1))) if x < 3 else (math.inf, math.inf)


def shifted(x: float) -> tuple[float, float]:
    loss, slope = wavy(x)
    return loss - 0.5 * x, slope - 0.5


CURVES = {"near": parabola(0.01), "at once": parabola(1.0), "far": parabola(300.0), "wavy": shifted, "steep": steep}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("first", [1e-3, 1.0, 50.0])
def test_strong_wolfe_conditions_hold(name: str, first: float) -> None:
    curve = CURVES[name]
    step, tried = search("strong_wolfe", curve, first)
    assert step is not None
    (loss, slope), (start, descent) = curve(step), curve(0.0)
    assert loss <= start + DECREASE * step * descent
    assert abs(slope) <= FLATNESS * abs(descent)
    assert tried[-1] == step, "what was tried last is where the shards are"


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("first", [1e-3, 1.0, 50.0])
def test_armijo_takes_the_first_that_decreases_enough(name: str, first: float) -> None:
    curve = CURVES[name]
    step, tried = search("armijo", curve, first)
    assert step is not None
    start, descent = curve(0.0)
    enough = [math.isfinite(curve(x)[0]) and curve(x)[0] <= start + DECREASE * x * descent for x in tried]
    assert enough == [False] * (len(tried) - 1) + [True]
    assert tried == sorted(tried, reverse=True)


@given(st.floats(1e-2, 1e2), st.floats(1e-2, 1e2), st.floats(0.0, 3.0), st.floats(1e-3, 1e2))
def test_convex_curves_are_searched_in_few_steps(at: float, scale: float, skew: float, first: float) -> None:
    def curve(x: float) -> tuple[float, float]:
        u = (x - at) / at
        return scale * (u * u + skew * u**4), scale * (2 * u + 4 * skew * u**3) / at

    step, tried = search("strong_wolfe", curve, first)
    assert step is not None
    assert abs(curve(step)[1]) <= FLATNESS * abs(curve(0.0)[1])
    assert len(tried) <= 12


@pytest.mark.parametrize("kind", SEARCHES)
def test_where_nothing_decreases_there_is_no_step(kind: str) -> None:
    for curve in (lambda x: (1.0 + x + (x > 0), -1.0), lambda x: (math.inf, math.inf) if x else (1.0, -1.0)):
        step, tried = search(kind, curve)
        assert step is None
        assert len(tried) <= 2 * TRIES


def test_a_loss_that_is_no_number_when_it_is_computed_once_more_is_no_step() -> None:
    """As where it draws random numbers. What is tried last is what would be taken."""
    seen: set[float] = set()

    def jumps(x: float) -> tuple[float, float]:
        again = x in seen
        seen.add(x)
        return (math.inf, math.inf) if again else (abs(x - 0.7), -1.0 if x < 0.7 else 1.0)

    step, tried = search("strong_wolfe", jumps)
    assert step is None
    assert tried[-1] in tried[:-1]


def test_at_the_limit_of_rounding_slopes_decide() -> None:
    """The loss cannot tell two steps apart any more: it is the same everywhere, to float32's digits."""
    step, tried = search("strong_wolfe", lambda x: (1.0 + 5e-8 * math.sin(1e6 * x), 1e-9 * (x - 1.0)))
    assert step == 1.0
    assert tried == [1.0]


def test_searches_do_not_begin_where_they_were_asked_not_to() -> None:
    for kind in (strong_wolfe, armijo):
        assert next(kind(1.0, -1.0, 0.125)) == 0.125
