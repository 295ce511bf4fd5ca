import math

import pytest

from squall.report.words import clock, loss_text, number, percent, plural, rate_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (60, "1:00"), (725, "12:05"), (10_880, "3:01:20"), (math.nan, "unknown")],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.123456, "0.1235"), (1234567.8, "1,234,568"), (2e-7, "2e-07"), (math.nan, "nan"), (math.inf, "inf")],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


def test_the_rest() -> None:
    assert (percent(1, 3), percent(0, 0)) == ("33 %", "-")
    assert (plural(1, "shard"), plural(2000, "shard")) == ("1 shard", "2,000 shards")
    assert (loss_text(0.5), loss_text(2e-5), loss_text(math.nan)) == ("0.5000", "2e-05", "nan")
    assert (rate_text(0), rate_text(0.123), rate_text(1234.5)) == ("0", "0.12", "1,234")
