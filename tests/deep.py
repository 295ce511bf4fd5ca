"""What `make deep` (`pytest --deep`) tries whole, and `make test` in part: a sweep is a part of itself there."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

only = pytest.mark.deep  # of a test that takes long and has a smaller sister in `make test`
wanted = False  # set by conftest.py
FIRST = datetime.date.today().toordinal() * 10_000  # seed of the day's own tries; the header of a deep run names it


def sweep(values: Sequence[T], few: int) -> Sequence[T]:
    """All of them, or `few` from the first to the last."""
    if wanted or len(values) <= few:
        return values
    return [values[index * (len(values) - 1) // max(1, few - 1)] for index in range(few)]


def seeds(count: int, deep: int) -> range:
    """The same every time, or so many that nobody has tried before."""
    return range(FIRST, FIRST + deep) if wanted else range(count)
