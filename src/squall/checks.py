"""What a setting must be."""

from __future__ import annotations


def require(name: str, value: object, holds: bool, must: str) -> None:
    """Raise a `ValueError` for a setting that does not hold; `must` is what it must be."""
    if not holds:
        raise ValueError(f"{name} is {value!r}: it must be {must}")


def require_one_of(name: str, value: str, values: tuple[str, ...]) -> None:
    require(name, value, value in values, f"one of {', '.join(values)}")
