"""What a user is told when the operating system refuses a file: which, why, and what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

LARGER = "make shared memory larger: docker run --shm-size=..., or mount -o remount,size=... /dev/shm"
_REMEDIES = {
    errno.EFBIG: "raise the limit on the size of files (ulimit -f unlimited)",
    errno.ENOSPC: "free some space on its disk",
    errno.EDQUOT: "free some of this user's space on its disk",
}


def refusal(path: Path, error: OSError) -> str:
    remedy = _REMEDIES.get(error.errno or 0, "choose another run directory, that this user may write to")
    return f"{path} cannot be written ({error.strerror or error}): {remedy}"


class Telling:
    """Standard error of a run's processes: where it leads to a full disk, what is told is lost, and nothing ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Raises `ValueError` where the file or directory is refused."""
    try:
        yield
    except OSError as error:
        raise ValueError(refusal(path, error)) from error
