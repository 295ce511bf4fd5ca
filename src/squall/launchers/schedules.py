"""Schedules come to the run's directory from the machines of a run, when their processes have ended."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.member_messages import PIECE_BYTES, Scheduled

BLOCK_BYTES = 1 << 12  # that a file takes on a disk, however small it is
UNSENT_AT_MOST = 1 << 26  # bytes that wait for a head that is slow to read


def give_schedules(head: ControlPipe, schedule: Path, shards: bool = True) -> None:
    """Of a machine's processes, from where they have written them; not of shards that go on elsewhere."""
    for path in sorted(schedule.iterdir()):
        if path.name.startswith("shard") and not shards:
            continue
        if path.suffix not in (".json", ".pickle"):  # those lie beside the head's own
            with open(path, "rb") as file:
                while data := file.read(PIECE_BYTES):
                    head.say(kind="scheduled", file=path.name, data=data)
                    head.connection.flush(UNSENT_AT_MOST)


class Schedules:
    """On the head: the files of one attempt that other machines have given, each `at_most` so many bytes in all."""

    def __init__(self, attempt: Path, at_most: float = math.inf) -> None:
        self._attempt = attempt
        self._given: dict[str, int] = {}  # file -> whose it is
        self._left: dict[int, float] = defaultdict(lambda: at_most)  # machine -> bytes that it may give yet

    def take(self, machine: int, said: dict[str, Any]) -> None:
        """Raises `OSError`: it cannot be written, is there already as another's, or is too much."""
        piece = msgspec.convert(said, Scheduled)
        new = piece.file not in self._given
        if self._given.setdefault(piece.file, machine) != machine:
            raise FileExistsError(f"{piece.file} of machine {self._given[piece.file]}, given by machine {machine}")
        self._left[machine] -= len(piece.data) + new * BLOCK_BYTES
        if self._left[machine] < 0:
            raise OSError("it is more than --keep-schedule allows for")
        flags = os.O_WRONLY | os.O_APPEND | (os.O_CREAT | os.O_EXCL if new else 0)
        with open(os.open(self._attempt / piece.file, flags, 0o600), "ab") as file:
            file.write(piece.data)
