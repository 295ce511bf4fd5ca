"""A run without a terminal: its launching process is a fork of the command, in a session of its own.

Up to the training it is the command's: what it says is seen, its exit status is the command's, Ctrl-C reaches it, and
it is ended with the command. Then it says so, and from there on its output is the run's log. How it has ended it leaves
in a file, for who attaches later. One that is killed is succeeded (`keeper.py`).
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import msgspec

from squall.runtime.log import log_into
from squall.runtime.processes import die_with_parent, identity, lives, outlive_parent, send

FILE = "detached.json"  # in the run's directory
PATH_BYTES = 4096


class Outcome(msgspec.Struct, frozen=True):
    """Of a command: its exit status, and what it has written on stdout and on stderr behind its progress."""

    status: int
    output: str = ""
    error: str = ""


class Detached(msgspec.Struct, frozen=True):
    """What is known of a launching process without a terminal."""

    launcher: str  # its `identity`, as it is in the lock
    keeper: str = ""  # the identity of who goes on with the run when it is killed; "": nobody
    outcome: Outcome | None = None  # None: it has not ended, or was killed


class Daemon:
    """The launching process, seen by itself."""

    def __init__(self, line: int, as_json: bool) -> None:
        self._line = line  # to the command
        self._home, self._flags = os.getcwd(), ["--json"] if as_json else []  # of a command that goes on with the run
        self._directory: Path | None = None
        self._known: Detached | None = None
        self.outputs = [1, 2]  # descriptors that lead to the terminal

    def begins(self, directory: Path) -> None:
        """All is well until the training: the command may end. Called again, this does nothing."""
        if self._directory is not None:
            return
        from squall import keeper
        from squall.runtime.snapshot import Snapshots  # which needs torch

        self._directory, own = directory, identity(os.getpid())
        log_into(directory, self.outputs)
        newest, keeps = max(Snapshots(directory).numbers(), default=0), ""
        with suppress(OSError):  # no more processes for now: it is missed by nobody
            keeps = identity(keeper.start(directory, own, newest, self._home, self._flags))
        self._known = Detached(own, keeps)
        self._write(self._known)
        outlive_parent()
        with suppress(BrokenPipeError):  # the terminal is gone just now
            os.write(self._line, os.fsencode(directory))
        os.close(self._line)

    def ended(self, outcome: Outcome) -> None:
        if self._known is None or self._directory is None or not self._directory.is_dir():
            return
        try:
            self._write(msgspec.structs.replace(self._known, outcome=outcome))
        except OSError:  # who attaches learns less; nobody may take this for a death
            (self._directory / FILE).unlink(missing_ok=True)

    def _write(self, detached: Detached) -> None:
        """Whole or not at all."""
        assert self._directory is not None
        new = self._directory / f"{FILE}.new"
        file = os.open(new, os.O_WRONLY | os.O_TRUNC | os.O_CREAT, 0o600)
        with open(file, "wb") as opened:
            opened.write(msgspec.json.encode(detached))
        new.rename(self._directory / FILE)


class Command(NamedTuple):
    """The command that has forked a launching process."""

    daemon: int  # pid
    line: int

    def wait(self) -> Path | int:
        """The run's directory, when its training goes on; or the exit status, where it has ended before."""

        def hand_on(number: int, frame: object) -> None:
            with suppress(ProcessLookupError):
                os.kill(self.daemon, number)

        before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            if self.line in wait([self.line, os.pidfd_open(self.daemon)]) and (said := os.read(self.line, PATH_BYTES)):
                return Path(os.fsdecode(said))
            code = os.waitstatus_to_exitcode(os.waitpid(self.daemon, 0)[1])
            return code if code >= 0 else 128 - code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def fork(as_json: bool) -> Daemon | Command:
    """Fork; each process is told which of the two it is."""
    readable, writable = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    command = os.getpid()
    if daemon := os.fork():
        os.close(writable)
        return Command(daemon, readable)
    os.setsid()
    die_with_parent(command, signal.SIGTERM)
    os.close(readable)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return Daemon(writable, as_json)


def detached(directory: Path) -> Detached | None:
    """What the last launching process without a terminal has left, if one has."""
    try:
        return msgspec.json.decode((directory / FILE).read_bytes(), type=Detached)
    except (OSError, msgspec.DecodeError):
        return None


def end_keeper(directory: Path, now: bool) -> None:
    """Who goes on with the run shall not. It may be a command already that does so, which hands SIGTERM on."""
    last = detached(directory)
    if last is not None and (now or not lives(last.launcher)):
        send(last.keeper, signal.SIGKILL if now else signal.SIGTERM)
        send(last.keeper, signal.SIGCONT)  # where it was stopped


def succeeded(directory: Path) -> bool:
    """Whether another launching process is to come, though there may be no process of the run just now."""
    last = detached(directory)
    return last is not None and last.outcome is None and lives(last.keeper)
