"""What a setting must be, and what it needs."""

from __future__ import annotations

from importlib.util import find_spec


def require(name: str, value: object, holds: bool, must: str) -> None:
    """Raise a `ValueError` for a setting that does not hold; `must` is what it must be."""
    if not holds:
        raise ValueError(f"{name} is {value!r}: it must be {must}")


def require_one_of(name: str, value: str, values: tuple[str, ...]) -> None:
    require(name, value, value in values, f"one of {', '.join(values)}")


def require_extra(package: str, name: str) -> None:
    """Raise a `ValueError` with the remedy unless a package is installed; its extra is called as the package is."""
    if find_spec(package) is None:
        raise ValueError(f"{name} is not installed: pip install 'squall-train[{package}]'")
