"""A first machine that was lost, and has joined its run again, gets what its directory lacks when the run has ended.

    `squall join` -> head    joins once more, with a hello that `fetches`
    head -> `squall join`    "files" with their names, and these behind it; or "nothing" and why

What was in the directory before is moved aside, where it takes room and does no harm.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from squall.errors import SquallError
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.files import give_files, take_files
from squall.launchers.joining.call import Call
from squall.launchers.joining.joining import join
from squall.launchers.joining.token import TOKEN
from squall.record.rows import EventRow, RecordError
from squall.record.settling import settle
from squall.report import Reader
from squall.runtime.disk import written
from squall.runtime.lock import LOCK, hold
from squall.runtime.running import PLAN

RECORD = "run.sqlite"
ASIDE, COMING = "before", "coming"  # folders in the directory that is completed
OWN = (LOCK, TOKEN)  # which each directory has for itself
ANSWERS_WITHIN_S = 10.0
WITHOUT = "what it lacks is in the run's directory on the machine where the run has ended: copy that one"


def directory_of(path: str) -> Path:
    """One that can be completed. Raises `ValueError`, with the remedy."""
    directory = Path(path).resolve()
    if not (directory / PLAN).is_file() or not (directory / RECORD).is_file():
        raise ValueError(f"--complete {path}: there is no run in it; give the directory that the run had here at first")
    with hold(directory):
        return directory


def give_directory(machine: ControlPipe, directory: Path) -> None:
    """All that a run has left here, from which nobody goes on meanwhile. `machine` may be gone."""
    try:
        with hold(directory), TemporaryDirectory(dir=directory, prefix=f"{COMING}-") as own:
            files = {name: directory / name for name in _names(directory)}
            files[RECORD] = _copied(directory / RECORD, Path(own) / RECORD)
            machine.say(kind="files", files=list(files))
            give_files(machine, files.values())
            machine.connection.flush()
    except (OSError, ValueError, sqlite3.Error) as error:
        machine.say(kind="nothing", why=str(error))


def _names(directory: Path) -> Iterator[str]:
    """Of files that another directory of this run is to have."""
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.is_file() and not path.is_symlink() and not name.name.startswith(RECORD) and _may_come(str(name)):
            yield str(name)


def _may_come(name: str) -> bool:
    path = PurePosixPath(name)
    first = path.parts[0] if path.parts else ""
    inside = not path.is_absolute() and ".." not in path.parts and first not in ("", *OWN)
    return inside and not first.startswith((ASIDE, COMING))


def _copied(record: Path, to: Path) -> Path:
    """As it is now, whoever reads it."""
    with closing(sqlite3.connect(record)) as before, closing(sqlite3.connect(to)) as after:
        before.backup(after)
    settle(to)
    return to


def complete(call: Call, directory: Path, tell: Callable[[str], object]) -> None:
    """Fetch what the run has left where it ended; `tell` is given what has come of that."""
    try:
        with hold(directory), written(directory), _coming(directory) as coming:
            _fetch(replace(call, wait_s=ANSWERS_WITHIN_S, fetches=True), coming)
            _compare(directory, coming)
            aside = _swap(directory, coming)
    except (OSError, EOFError, ValueError, SquallError, RecordError) as error:
        tell(f"warning: {directory} is not completed ({error or 'the run was gone'}): {WITHOUT}")
    else:
        tell(f"{directory} has all of the run now; what was in it before is in {aside}, and may be removed")


@contextmanager
def _coming(directory: Path) -> Iterator[Path]:
    coming = directory / COMING
    shutil.rmtree(coming, ignore_errors=True)
    coming.mkdir(mode=0o700)
    try:
        yield coming
    finally:
        shutil.rmtree(coming, ignore_errors=True)


def _fetch(call: Call, coming: Path) -> None:
    head = ControlPipe(join(call, lambda text: None).pipe)
    try:
        said = head.hear()
        if said is None or said["kind"] != "files":
            raise ValueError("the run was gone" if said is None else said["why"])
        take_files(head, coming, _checked(said["files"]))
    finally:
        head.connection.close()


def _checked(names: Iterable[str]) -> list[str]:
    names = list(names)
    if wrong := [name for name in names if not _may_come(name)]:
        raise ValueError(f"it would have {wrong[0]!r} written")
    return names


def _compare(directory: Path, coming: Path) -> None:
    """Raises `ValueError` where what has come is not what became of the run that is here."""
    settle(directory / RECORD)
    if (coming / PLAN).read_bytes() != (directory / PLAN).read_bytes():
        raise ValueError("what has come is another run")
    here, there = (_starts(path / RECORD) for path in (directory, coming))
    if here > there:
        raise ValueError(f"the run was started {here} times in this directory, and {there} times as it came to its end")


def _starts(record: Path) -> int:
    with closing(Reader(record)) as reader:
        return sum(row.kind == "started" for row in reader.rows(EventRow))


def _swap(directory: Path, coming: Path) -> Path:
    """The record comes last: until then there is no run in the directory."""
    numbers = (f"{ASIDE}-{number}" if number > 1 else ASIDE for number in range(1, 1 << 16))
    aside = next(path for name in numbers if not (path := directory / name).exists())
    aside.mkdir(mode=0o700)
    for path in [path for path in directory.iterdir() if _may_come(path.name)]:
        path.rename(aside / path.name)
    for path in sorted(coming.iterdir(), key=lambda path: path.name == RECORD):
        os.rename(path, directory / path.name)
    return aside
