"""A first machine that was lost, and has joined its run again, gets what its directory lacks when the run ends.

    head -> nursery    "complete" with the names of files, and these behind it

Where the directory is the user has said by `--token-file`, which lies in it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.files import give_files, take_files
from squall.launchers.joining.call import RECORD
from squall.launchers.joining.token import TOKEN
from squall.runtime.lock import LOCK, hold
from squall.runtime.running import PLAN

LEFT = (f"{RECORD}-wal", f"{RECORD}-shm")  # by who was killed: SQLite would put them into the new record


def give_directory(machine: ControlPipe, directory: Path) -> None:
    """All that the run has kept here."""
    files = [path for path in sorted(directory.rglob("*")) if path.name not in (LOCK, TOKEN) and path.is_file()]
    files = [path for path in files if path.stat().st_size]
    machine.say(kind="complete", files=[str(path.relative_to(directory)) for path in files])
    give_files(machine, files)


def complete(head: ControlPipe, directory: str, said: dict[str, Any]) -> str:
    """Returns what the user is to be told. Until all is here, nothing is changed."""
    try:
        _take(head, Path(directory), said["files"])
    except (OSError, EOFError, ValueError) as error:
        return f"warning: {directory} is not completed: {error or 'the run was over before'}"
    return f"{directory} has all of the run now"


def _take(head: ControlPipe, directory: Path, names: list[str]) -> None:
    coming = directory / "coming"
    with hold(directory):
        shutil.rmtree(coming, ignore_errors=True)
        coming.mkdir(mode=0o700)
        try:
            take_files(head, coming, names)
            if (coming / PLAN).read_bytes() != (directory / PLAN).read_bytes():
                raise ValueError("it is of another run")
            for name in LEFT:
                (directory / name).unlink(missing_ok=True)
            for name in names:
                (directory / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.replace(coming / name, directory / name)
        finally:
            shutil.rmtree(coming, ignore_errors=True)
