"""What a user is told when the operating system refuses a file: which, why, and what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REMEDIES = {
    errno.EFBIG: "raise the limit on the size of files (ulimit -f unlimited)",
    errno.ENOSPC: "free some space on its disk",
    errno.EDQUOT: "free some of this user's space on its disk",
}


def refusal(path: Path, error: OSError) -> str:
    remedy = _REMEDIES.get(error.errno or 0, "choose another run directory, that this user may write to")
    return f"{path} cannot be written ({error.strerror or error}): {remedy}"


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Raises `ValueError` where the file or directory is refused."""
    try:
        yield
    except OSError as error:
        raise ValueError(refusal(path, error)) from error
