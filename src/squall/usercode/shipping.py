"""The user's own functions as bytes, for the processes of a run and for its directory."""

from __future__ import annotations

import cloudpickle


def ship(code: object) -> bytes:
    """A pickle by value, also of closures and `__main__`. Raises `ValueError` for what no other process could have."""
    try:
        shipped: bytes = cloudpickle.dumps(code)
    except Exception as error:  # whatever a `__reduce__` raises
        raise ValueError(
            f"the task cannot be shipped to other processes ({error}): make what it holds, such as a lock or a"
            " connection, inside the task function, and open files where they are read"
        ) from error
    return shipped
