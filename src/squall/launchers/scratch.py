"""Directories for a run's sockets and files, under the system's temporary one. What killed runs leave the next removes.

A directory is in use while somebody holds a lock (flock) on a file in it: processes that are forked do so as well.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from squall.errors import SquallError
from squall.transports.doorbell import LONGEST_NAME, PATH_BYTES

_LOCK = "in-use.lock"


def new_name() -> Path:
    return Path(tempfile.gettempdir()) / f"squall-{secrets.token_hex(8)}"


def check_length(path: Path) -> None:
    """Raise `SquallError` where sockets in it would have names that are too long for the kernel."""
    if len(os.fsencode(path)) + LONGEST_NAME > PATH_BYTES:
        raise SquallError(f"sockets in {path} would have too long names: set TMPDIR to a shorter path")


def make(path: Path) -> int:
    """Make the directory; returns the lock's descriptor."""
    for left in Path(tempfile.gettempdir()).glob(f"squall-{'[0-9a-f]' * 16}"):
        with suppress(OSError):
            _remove_unused(left)
    path.mkdir(mode=0o700)
    handle = os.open(path / "new", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_SH)
    (path / "new").rename(path / _LOCK)  # nobody finds it before it is held
    return handle


def _remove_unused(left: Path) -> None:
    """Raises `OSError` where it is in use. Others may have put anything there under such a name."""
    if left.lstat().st_uid != os.getuid():
        return
    handle = os.open(left / _LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(left, ignore_errors=True)
    finally:
        os.close(handle)


def share(path: Path) -> int:
    """Hold what another process has made."""
    handle = os.open(path / _LOCK, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


@contextmanager
def directory() -> Iterator[Path]:
    """For as long as this lasts."""
    path = new_name()
    handle = make(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # also of a nursery that was killed
        os.close(handle)
