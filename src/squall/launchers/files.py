"""Files go from the head to a machine of the run, over the pipe that its orders come by."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from squall.launchers.control_pipe import ControlPipe

PIECE_BYTES = 1 << 20


def give_files(machine: ControlPipe, files: Iterable[Path]) -> None:
    """To a machine that was told their names, and takes them next."""
    for file in files:
        for piece in _pieces(file):
            machine.send(piece)
        machine.send(b"")


def _pieces(file: Path) -> Iterator[memoryview]:
    """What waits to be sent of it takes no memory."""
    with open(file, "rb") as opened:
        if not os.fstat(opened.fileno()).st_size:
            return
        whole = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    for start in range(0, len(whole), PIECE_BYTES):
        yield whole[start : start + PIECE_BYTES]


def take_files(head: ControlPipe, directory: Path, names: Iterable[str], silent_s: float | None = None) -> None:
    """Where none of these is, in private folders.

    Raises `OSError` where there is no room, `EOFError` where the head is gone, or silent for so long.
    """
    for name in names:
        file = directory / name
        for folder in reversed([path for path in file.parents if directory in path.parents]):
            folder.mkdir(mode=0o700, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            while piece := _next(head, silent_s):
                opened.write(piece)


def _next(head: ControlPipe, silent_s: float | None) -> bytes:
    if silent_s is not None and not head.connection.poll(silent_s):
        raise EOFError(f"nothing has come for {silent_s:g} s")
    piece: bytes = head.connection.recv_bytes()
    return piece
