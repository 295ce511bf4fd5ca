"""Who may write to a run's directory: the processes of one start of it, for as long as any of them lives.

The lock (flock) belongs to the open file, which the launching process hands to the nursery, and which all that are
forked from there inherit. So it is held by whoever could still write, also when the launching process is gone.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from squall.runtime.disk import written


@contextmanager
def hold(directory: Path) -> Iterator[int]:
    """Keep others from training in this directory; the lock's descriptor is for those who train here as well.

    Raises `ValueError` when somebody else does, or when nothing can be written there.
    """
    path = directory / "lock"
    with written(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with open(handle, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(_refusal(path, file.read())) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield handle


def holders(path: Path) -> dict[int, str]:
    """Pid -> title of the other processes of this user that have the file open."""
    found, name = {}, str(path.resolve())
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended meanwhile
            if os.readlink(link) == name and (pid := int(link.parts[2])) != os.getpid():
                found[pid] = (link.parents[1] / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return found


def _refusal(path: Path, launcher: str) -> str:
    others = holders(path)
    if not others:
        return f"{path.parent} is being trained by another process: wait for it, or end it first"
    if launcher.isdecimal() and int(launcher) in others:
        what = f"is being trained by another process (pid {launcher})"
        return f"{path.parent} {what}: wait for it, or stop it: kill {launcher}"
    named = ", ".join(f"{title} (pid {pid})" for pid, title in sorted(others.items()))
    pids = " ".join(map(str, sorted(others)))
    return f"{path.parent} is still held by {named}, whose launching process is gone: end them: kill -KILL {pids}"
