"""Who trains in a run's directory, seen from another process.

No pid is trusted, for it may have been given to another process since: whoever belongs to a run holds its lock. Who is
to be signalled has a descriptor opened before that is looked at, so that nobody else can be hit.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import TextIO

from squall.runtime.lock import LOCK, held, holders
from squall.runtime.processes import descriptor_of, lives

PLAN = "run.json"  # in the directory of any run
KILLED_WITHIN_S = 0.1  # seconds, before it is looked who still lives
STOPPING = "stopping"  # file in the run's directory: the launching process that was asked to stop it


def running(within: Path | None = None) -> dict[Path, set[int]]:
    """Directory -> pids of each run that this user's processes train on this machine."""
    found: dict[Path, set[int]] = defaultdict(set)
    for lock, pid in held():
        if (lock.parent / PLAN).exists() and (within is None or lock.is_relative_to(within.resolve())):
            found[lock.parent].add(pid)
    return {directory: pids for directory, pids in found.items() if not kept(directory)}


def kept(directory: Path) -> bool:
    """For a run that another machine leads, to go on from here if that is lost: nobody ends it here."""
    return launcher(directory) is None and bool(holders(directory / LOCK))


def launcher(directory: Path) -> str | None:
    """The identity of the launching process, as the lock has it, that lives or was the last; None: there was none."""
    with suppress(OSError):
        return (directory / LOCK).read_text() or None
    return None


def living(directory: Path) -> int | None:
    """The pid of the launching process, if that still belongs to the run."""
    told = launcher(directory) or ""
    if not lives(told):
        return None
    pid = int(told.partition(" ")[0])
    return pid if pid in holders(directory / LOCK, [pid]) else None


@contextmanager
def caught(directory: Path, pid: int | None) -> Iterator[int | None]:
    """A descriptor of that process of the run; None if it is none of its."""
    handle = None
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid) if pid is not None else None
    try:
        yield handle if pid is not None and handle is not None and pid in holders(directory / LOCK, [pid]) else None
    finally:
        if handle is not None:
            os.close(handle)


def ask_to_stop(directory: Path) -> bool:
    """As Ctrl-C does, once: two who ask at the same time have it stopped in order. False: it was asked before.

    One that is gone already is succeeded by nobody then.
    """
    told = launcher(directory) or ""
    pid = living(directory)
    if pid is None and lives(told):
        return False  # it does not hold the lock just now
    with suppress(FileNotFoundError), _asked(directory) as file, caught(directory, pid) as handle:
        if file.read() == told:
            return False
        _write(file, told)
        if handle is not None:
            _send(handle, signal.SIGTERM)
            _send(handle, signal.SIGCONT)  # where it was stopped
            return True
    return False


@contextmanager
def _asked(directory: Path) -> Iterator[TextIO]:
    """Raises `FileNotFoundError` where the directory is gone, as that of a run that has not begun."""
    with open(os.open(directory / STOPPING, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _write(file: TextIO, told: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(told)


def stopping(directory: Path) -> bool:
    """Whether the run, as it was launched last, was asked to stop."""
    with suppress(OSError):
        return (directory / STOPPING).read_text() == launcher(directory)
    return False


def kill(directory: Path) -> None:
    """All processes of the run, the launching one first: it would start it again, and so would its keeper.

    Some may fork others meanwhile.
    """
    while True:
        with suppress(FileNotFoundError), _asked(directory) as file:
            _write(file, launcher(directory) or "")
        first = living(directory)
        pids = sorted(holders(directory / LOCK), key=lambda pid: pid != first)
        if not pids:
            return
        for pid in pids:
            with caught(directory, pid) as handle:
                if handle is not None:
                    _send(handle, signal.SIGKILL)
        ended(directory, KILLED_WITHIN_S)


def ended(directory: Path, within_s: float) -> bool:
    """Whether no process of the run is left, after a wait for one of them at most."""
    pid = living(directory)  # to look for the others takes longer
    pid = next(iter(holders(directory / LOCK)), None) if pid is None else pid
    if pid is None:
        return True
    with caught(directory, pid) as handle:
        if handle is not None:
            wait([handle], within_s)
    return False


def _send(handle: int, number: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, number)


def wait_gone(process: str, within_s: float | None = None) -> None:
    """Wait until that process has ended, by its identity; None: however long."""
    with descriptor_of(process) as handle:
        if handle is not None:
            wait([handle], within_s)
