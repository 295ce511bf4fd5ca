"""When the last update was made, seen from outside: replicas write what they push into the run's schedule at once.

Where there is no schedule (any more), the record's rows of progress tell, half a second late.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from squall.record.rows import ProgressRow, RecordError
from squall.report import Reader
from squall.runtime.schedule import BEGIN, ESCAPE, HEAD, MAGIC

LOOK_EVERY = 10  # looks at the schedule for one at the record


class Updates:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[Path, _Followed] = {}
        self._reader: Reader | None = None
        self._rows = self._looks = 0

    def follow(self, directory: Path) -> None:
        """The run has another one from now on."""
        self.close()
        self._directory, self._files, self._reader, self._rows = directory, {}, None, 0

    def moved(self) -> bool:
        """Whether there are any that there were not at the last look."""
        moved = False
        for path in self._directory.glob("schedule/*/replica-*"):
            if path not in self._files:
                self._files[path] = _Followed(path)
            moved |= self._files[path].moved()
        self._looks += 1
        return (self._looks % LOOK_EVERY == 0 and self._told()) or moved

    def _told(self) -> bool:
        """There are new rows of progress."""
        with suppress(RecordError):
            if self._reader is None:
                self._reader = Reader(self._directory / "run.sqlite")
            before, self._rows = self._rows, self._reader.newest(ProgressRow)
            return self._rows > before
        return False

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._reader is not None:
            self._reader.close()


class _Followed:
    """A file of the schedule, up to its last record so far. `runtime.schedule` has its form."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._pieces, self._at = self._read(len(MAGIC), BEGIN - len(MAGIC)), BEGIN

    def moved(self) -> bool:
        pieces, before = self._read(len(MAGIC), BEGIN - len(MAGIC)), self._at
        if pieces != self._pieces:  # what was in it is in another file now
            self._pieces, self._at = pieces, BEGIN
        while head := self._read(self._at, HEAD + 4):
            if not (length := head[0]):
                break
            if length == ESCAPE:
                length = 4 + int.from_bytes(head[HEAD:], "little")
            self._at += HEAD + length
        return self._at not in (before, BEGIN)

    def _read(self, at: int, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, at)

    def close(self) -> None:
        self._file.close()
