"""Quantities with units, read and written without losing a bit: a text read gives the float that it was written from.

Decimal arithmetic does that: a float's shortest text moved by a power of ten is the same number when it is moved back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(.*)")


@dataclass(frozen=True)
class Units:
    """What a quantity may be given in.

    Attributes:
        what: "a time", for messages.
        example: such as "100 us".
        factors: unit -> how much of the base unit (seconds, bytes a second) it is.
    """

    what: str
    example: str
    factors: Mapping[str, Decimal]


def _prefixed(unit: str, one: str) -> dict[str, Decimal]:
    prefixes = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12}
    return {prefix + unit: Decimal(one).scaleb(power) for prefix, power in prefixes.items()}


_BITS, _BYTES = _prefixed("bit/s", "0.125"), _prefixed("B/s", "1")
_BINARY = {f"{prefix}iB/s": Decimal(2 ** (10 * power)) for power, prefix in enumerate("KMGT", 1)}

TIME = Units(
    "a time", "100 us",
    {
        "ns": Decimal("1e-9"), "us": Decimal("1e-6"), "µs": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1),
        "min": Decimal(60), "h": Decimal(3600), "d": Decimal(86400),
    },
)  # fmt: skip
BANDWIDTH = Units("a bandwidth", "10 Gbit/s", {**_BITS, **_BYTES, **_BINARY})


class NoUnit(ValueError):
    """A number where a quantity belongs."""


def parse(text: str, units: Units) -> float:
    """The quantity in its base unit. Raises `NoUnit`, or `ValueError` with what is wrong with the text."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not {units.what}")
    value, unit = match.groups()
    if not unit:
        raise NoUnit(text)
    if unit not in units.factors:
        raise ValueError(f"{text!r} has the unit {unit!r}, which is not one of {', '.join(units.factors)}")
    return float(Decimal(value) * units.factors[unit])


def write_time(seconds: float) -> str:
    """``12 ms``, ``2 min``: `parse` gives exactly the same seconds back."""
    exact = Decimal(repr(seconds))
    for unit in ("d", "h", "min"):
        factor = TIME.factors[unit]
        if factor <= exact < 10**15 and exact % factor == 0:
            return f"{_plain(exact / factor)} {unit}"
    return _largest(exact, {unit: TIME.factors[unit] for unit in ("s", "ms", "us", "ns")})


def write_bandwidth(bytes_per_s: float, bits: bool) -> str:
    """``10 Gbit/s``, or ``12 GB/s``: `parse` gives exactly the same bytes a second back."""
    factors = _BITS if bits else _BYTES
    return _largest(Decimal(repr(bytes_per_s)), dict(reversed(factors.items())))


def _largest(exact: Decimal, factors: Mapping[str, Decimal]) -> str:
    """In the first unit of which there is at least one; the last, for less than that. From the largest unit down."""
    unit = next((u for u, factor in factors.items() if exact >= factor), list(factors)[-1])
    return f"{_plain(exact / factors[unit])} {unit if exact else next(iter(factors))}"


def _plain(value: Decimal) -> str:
    return format(value.normalize(), "f") if value else "0"
