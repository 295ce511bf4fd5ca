"""Who may write to a run's directory: the processes of one start of it, for as long as any of them lives.

The lock (flock) belongs to the open file, which the launching process hands to the nursery, and which all that are
forked from there inherit. So it is held by whoever could still write, also when the launching process is gone.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from squall.runtime.disk import written
from squall.runtime.processes import identity

LOCK = "lock"  # file in the run's directory


@contextmanager
def hold(directory: Path) -> Iterator[int]:
    """Keep others from training in this directory; the lock's descriptor is for those who train here as well.

    Raises `ValueError` when somebody else does, or when nothing can be written there.
    """
    handle = take(directory, os.getpid())
    try:
        yield handle
    finally:
        os.close(handle)


def take(directory: Path, launcher: int | None) -> int:
    """The same, until the descriptor is closed that it returns. `launcher`: who ends it all, if anybody."""
    path = directory / LOCK
    with written(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if launcher is None:
                os.truncate(handle, 0)
            else:
                sign(handle, launcher)
        except BlockingIOError:
            told = os.pread(handle, 100, 0).decode()
            os.close(handle)
            raise ValueError(_refusal(path, told)) from None
        except OSError:
            os.close(handle)
            raise
    return handle


def sign(handle: int, launcher: int) -> None:
    """Who ends it all, to all who look at the lock."""
    told = identity(launcher).encode()
    os.pwrite(handle, told, 0)
    os.truncate(handle, len(told))


def holders(path: Path, among: Iterable[int] | None = None) -> dict[int, str]:
    """Pid -> title of the other processes of this user that hold the lock, of all or `among` some."""
    found, name = {}, path.resolve()
    for pid in {pid for file, pid in held(among) if file == name} - {os.getpid()}:
        with suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return found


def held(among: Iterable[int] | None = None) -> Iterator[tuple[Path, int]]:
    """Files named as a run's lock, and pids of this user's processes that hold such a lock (who reads it does not)."""
    for process in filter(str.isdecimal, os.listdir("/proc")) if among is None else map(str, among):
        with suppress(OSError):  # it has ended meanwhile
            links = list(Path(f"/proc/{process}/fd").iterdir())
            for link in links:
                with suppress(OSError):  # it has closed the file meanwhile
                    file = Path(os.readlink(link))
                    if file.name == LOCK and "FLOCK" in Path(f"/proc/{process}/fdinfo/{link.name}").read_text():
                        yield file, int(process)


def _refusal(path: Path, launcher: str) -> str:
    others, launcher = holders(path), launcher.partition(" ")[0]
    if not others:
        return f"{path.parent} is being trained by another process: wait for it, or end it first"
    if launcher.isdecimal() and int(launcher) in others:
        what = f"is being trained by another process (pid {launcher})"
        return f"{path.parent} {what}: wait for it, or stop it: kill {launcher}"
    named = ", ".join(f"{title} (pid {pid})" for pid, title in sorted(others.items()))
    pids = " ".join(map(str, sorted(others)))
    return f"{path.parent} is still held by {named}, whose launching process is gone: end them: kill -KILL {pids}"
