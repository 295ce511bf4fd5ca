"""A first machine that was lost, and has joined its run again, gets what its directory lacks when the run has ended.

    `squall join` -> head    joins once more, with a hello that `fetches`
    head -> `squall join`    "files" with their names, and these behind it; or "nothing" and why

What was there and came from nowhere stays; what is replaced is moved aside.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.files import give_files, take_files
from squall.launchers.joining.call import Call
from squall.launchers.joining.token import TOKEN
from squall.record.rows import EventRow
from squall.record.settling import settle
from squall.report import Reader
from squall.runtime.disk import written
from squall.runtime.lock import LOCK, hold
from squall.runtime.running import PLAN

RECORD = "run.sqlite"
SNAPSHOTS = "snapshots"
ASIDE, COMING = "before", "coming"  # folders in the directory that is completed
OWN = (LOCK, TOKEN)  # which each directory has for itself
SILENT_S = 60.0  # that a head may be which has answered: it waits for other machines to end
ANSWERS_WITHIN_S = 10.0


def directory_of(path: str) -> Path:
    """One that can be completed. Raises `ValueError`, with the remedy."""
    directory = Path(path).resolve()
    if not (directory / PLAN).is_file() or not (directory / RECORD).is_file():
        raise ValueError(f"--complete {path}: there is no run in it; give the directory that the run had here at first")
    with hold(directory):
        return directory


# ------------------------------------------------------------ where the run has ended


@contextmanager
def given(directory: Path) -> Iterator[dict[str, Path]]:
    """Name -> file of all that another directory of this run is to have; meanwhile nobody goes on from here.

    Raises `OSError`, `ValueError` or `sqlite3.Error` where that cannot be.
    """
    with hold(directory), TemporaryDirectory(prefix="squall-") as own:
        files = {name: directory / name for name in _names(directory)}
        yield {**files, RECORD: _settled(directory / RECORD, Path(own) / RECORD)}


def give_directory(machine: ControlPipe, files: Mapping[str, Path]) -> None:
    """To a machine that may be gone. Raises `OSError` for a file that cannot be read: then it hears no more."""
    try:
        machine.say(kind="files", files=list(files))
        for file in files.values():
            give_files(machine, [file])
            machine.connection.flush()
    finally:
        machine.connection.close()


def give_nothing(machine: ControlPipe, why: str) -> None:
    machine.say(kind="nothing", why=why)
    machine.connection.close()


def _names(directory: Path) -> Iterator[str]:
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_file() and not path.is_symlink() and not name.startswith(RECORD) and _may_come(name):
            yield name


def _may_come(name: str) -> bool:
    path = PurePosixPath(name)
    first = path.parts[0] if path.parts else ""
    inside = not path.is_absolute() and ".." not in path.parts and first not in ("", *OWN)
    return inside and not first.startswith((ASIDE, COMING))


def _settled(record: Path, to: Path) -> Path:
    """The record in one file; in a copy, where somebody reads it."""
    settle(record)
    if not Path(f"{record}-wal").exists():
        return record
    with closing(sqlite3.connect(record)) as before, closing(sqlite3.connect(to)) as after:
        before.backup(after)
    settle(to)
    return to


# ------------------------------------------------------------ where it began


def complete(call: Call, directory: Path, machine: int) -> Path:
    """Fetch what the run has left where it ended, as this machine of it. Returns where the files are that it replaced.

    Raises `ValueError` or `SquallError` where that cannot be; then the directory is as it was.
    """
    coming = directory / COMING
    with hold(directory), written(directory):
        shutil.rmtree(coming, ignore_errors=True)
        coming.mkdir(mode=0o700)
        try:
            _fetch(replace(call, number=machine, wait_s=ANSWERS_WITHIN_S, fetches=True), coming)
            _compare(directory, coming)
            aside = _put_aside(directory)
        except BaseException:
            shutil.rmtree(coming, ignore_errors=True)
            raise
        _bring_back(aside, coming)
        for path in sorted(coming.iterdir(), key=lambda path: path.name == RECORD):
            path.rename(directory / path.name)
        coming.rmdir()
        return aside


def _fetch(call: Call, coming: Path) -> None:
    from squall.launchers.joining.joining import join  # imports torch
    from squall.runtime.snapshot import sync

    head = ControlPipe(join(call, lambda text: None).pipe)
    try:
        said: dict[str, Any] | None = head.hear() if head.connection.poll(SILENT_S) else None
        if said is None or said["kind"] != "files":
            raise ValueError("it says nothing" if said is None else said["why"])
        take_files(head, coming, _checked(said["files"]), SILENT_S)
        for path in coming.rglob("*"):  # before anything has its place
            sync(path)
    except EOFError as error:
        raise ValueError(f"it has stopped in the midst of that: {error}") from None
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
    if not (coming / RECORD).exists() or (coming / PLAN).read_bytes() != (directory / PLAN).read_bytes():
        raise ValueError("what has come is another run")
    here, there = (_starts(path / RECORD) for path in (directory, coming))
    if here != there[: len(here)]:
        raise ValueError("the run was started again in this directory")


def _starts(record: Path) -> list[EventRow]:
    with closing(Reader(record)) as reader:
        return [row for row in reader.rows(EventRow) if row.kind == "started"]


def _put_aside(directory: Path) -> Path:
    """The record goes first: from then on there is no run in the directory. All stays where something cannot go."""
    numbers = (f"{ASIDE}-{number}" if number > 1 else ASIDE for number in range(1, 1 << 16))
    aside = next(path for name in numbers if not (path := directory / name).exists())
    aside.mkdir(mode=0o700)
    paths = [path for path in directory.iterdir() if _may_come(path.name)]
    try:
        for path in sorted(paths, key=lambda path: not path.name.startswith(RECORD)):
            path.rename(aside / path.name)
    except OSError:
        for path in aside.iterdir():
            path.rename(directory / path.name)
        aside.rmdir()
        raise
    return aside


def _bring_back(aside: Path, coming: Path) -> None:
    """What did not come: other schedules, the best weights, and snapshots that the run has made."""
    with closing(Reader(coming / RECORD)) as reader:
        newest = int(reader.state().get("snapshot") or 0)
    for path in [path for path in aside.iterdir() if not path.name.startswith(RECORD)]:
        there = coming / path.name
        if path.name != SNAPSHOTS and not there.exists():
            path.rename(there)
        elif path.is_dir():
            there.mkdir(mode=0o700, exist_ok=True)
            for inner in list(path.iterdir()):
                known = path.name != SNAPSHOTS or (inner.name.isdecimal() and int(inner.name) <= newest)
                if known and not (there / inner.name).exists():
                    inner.rename(there / inner.name)
