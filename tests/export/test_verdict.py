"""Verdicts on given figures."""

from __future__ import annotations

from math import nan

import pytest

from squall.export.verdict import Measured, decide, slow, spoiled


def measured(name: str, accuracy: float, *ms: float, size: int = 1000) -> Measured:
    return Measured(name, {"accuracy": accuracy}, {1: ms[0] / 1000, 64: ms[1] / 1000}, size)


BEFORE = measured("float32", 0.95, 1.0, 40.0, size=4000)


def test_the_fastest_of_those_that_are_as_good_is_accepted() -> None:
    good, better, spoilt = measured("a", 0.949, 0.9, 20), measured("b", 0.946, 0.5, 20), measured("c", 0.9, 0.1, 1)
    verdict = decide(BEFORE, [good, better, spoilt], 0.005)
    assert verdict.accepted == "b"
    assert verdict.refused == {"c": "accuracy goes from 0.9500 to 0.9000, and may change by 0.005"}
    assert "b is written: 2.00 x at 1, 2.00 x at 64" in str(verdict)


def test_nothing_is_accepted_where_all_are_refused_and_the_figures_are_shown() -> None:
    verdict = decide(BEFORE, [measured("a", 0.95, 2, 10), measured("b", 0.95, 1.0, 39.0)], 0.005)
    assert verdict.accepted is None
    assert verdict.refused == {"a": "it is 0.50 x as fast at batch 1", "b": "it is nowhere faster"}
    shown = str(verdict)
    for figure in ("0.9500", "2 ", "10", "500", "6,400", "1 kB", "4 kB", "INT8 is refused"):
        assert figure in shown


def test_noise_is_not_slower() -> None:
    assert slow(BEFORE, measured("a", 0.95, 1.04, 20)) == ""
    assert slow(BEFORE, measured("a", 0.95, 1.06, 20)) == "it is 0.94 x as fast at batch 1"


@pytest.mark.parametrize(
    ("name", "was", "now", "refused"),
    [
        ("accuracy", 0.95, 0.9451, False),
        ("accuracy", 0.95, 0.944, True),
        ("error_rate", 0.02, 0.03, True),  # nothing says that it is to fall
        ("bits_per_byte", 2.0, 2.009, False),
        ("bits_per_byte", 2.0, 2.011, True),
        ("loss", 0.1, 0.1004, False),
        ("loss", 0.1, 0.101, True),
        ("loss", 0.1, 0.05, False),
        ("loss", -1.0, -0.99, True),
        ("accuracy", 0.95, nan, True),
        ("loss", 1.0, nan, True),
    ],
)
def test_what_a_metric_may_change_by(name: str, was: float, now: float, refused: bool) -> None:
    assert bool(spoiled({name: was}, {name: now}, 0.005)) == refused
