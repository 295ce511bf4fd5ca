"""A node's schedule: the stream of effects that its host carried out, in a file that outlives the process.

    schedule/0/start.json     what the attempt began from; 0 is a fresh run, and every resume adds the next number
               shard-0.0      updates applied, with the pushes in each; weights sent to replicas; snapshots
               replica-1.0    batches computed, pushes, and fetched weights taken into use
               replica-1.1    of the process that replaced it

A file is `MAGIC`, then records: one byte of length (0: the end; 255: four bytes of length follow behind the checksum),
two bytes of a checksum that runs on over all records, and a msgpack list (`runtime.records` knows of what). It is
written through a mapping, so a record costs no system call and survives the death of its process; the length is stored
last, so a record is there as a whole or not at all. Room is reserved in steps, and what is not used is cut off at an
orderly end. A length of zero is the end; what lies behind it is a record that the process was killed over.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

FORMAT = 2
MAGIC = b"SQUALL\x00" + bytes((FORMAT,))
HEAD = 3  # bytes before a record: length, checksum
ESCAPE = 255
FIRST_BYTES, AT_MOST_BYTES = 1 << 12, 1 << 22  # by which a file grows; the step doubles from the first on

APPLIED, DELIVERED, SAVED, COMPUTED, SKIPPED, CONTINUED, PUSHED, PREPARED, USED, ENDED = range(10)
CALCULATED, ADDED, KEPT = range(10, 13)  # Sandblaster's

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder()


class Damaged(Exception):
    """A schedule cannot be read on. The message names the file and the record."""


class Log:
    """The schedule of one node, being written. When the disk is full it ends, with a warning; training goes on.

    A mapping holds a descriptor of its own, and no other is held: a simulated run has hundreds of nodes in one process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory: mmap.mmap | None = None
        self._size = 0  # bytes reserved
        self._at = len(MAGIC)  # where the next record goes
        self._check = 0
        try:
            self._grow(0, os.O_CREAT | os.O_EXCL)
        except OSError as error:
            self._give_up(error)
        else:
            assert self._memory is not None
            self._memory[: len(MAGIC)] = MAGIC

    def add(self, record: list[object]) -> None:
        data = _encode(record)
        size, at = len(data), self._at
        if at + HEAD + 4 + size >= self._size:
            if self._memory is None:
                return
            try:
                self._grow(HEAD + 4 + size)
            except OSError as error:
                self._give_up(error)
                return
        memory = self._memory
        assert memory is not None
        self._check = check = crc32(data, self._check)
        if size >= ESCAPE:
            data = size.to_bytes(4, "little") + data
            size = ESCAPE
        self._at = end = at + HEAD + len(data)
        memory[at + 1 : end] = (check & 0xFFFF).to_bytes(2, "little") + data
        memory[at] = size

    def close(self) -> None:
        """An orderly end."""
        if self._memory is None:
            return
        self.add([ENDED])
        self._release()

    def _grow(self, needed: int, flags: int = 0) -> None:
        """Reserved, so that a full disk is an error here, and not a signal that kills at the next record."""
        size = self._size + max(needed, min(max(self._size, FIRST_BYTES), AT_MOST_BYTES))
        file = os.open(self._path, os.O_RDWR | flags, 0o600)
        try:
            os.posix_fallocate(file, self._size, size - self._size)
            if self._memory is not None:
                self._memory.close()
            self._memory = mmap.mmap(file, size)
        finally:
            os.close(file)
        self._size = size

    def _give_up(self, error: OSError) -> None:
        reason = f"the schedule {self._path} is not recorded any more: {error.strerror}; a replay will end there"
        sys.stderr.write(f"squall: warning: {reason}\n")
        self._release()

    def _release(self) -> None:
        self._size = 0
        if self._memory is None:
            return
        self._memory.close()
        self._memory = None
        with contextlib.suppress(OSError):  # somebody has removed it
            os.truncate(self._path, self._at)


def read(path: Path) -> Iterator[list[Any]]:
    """The records of a file, as they were given to `Log.add`. Raises `Damaged` behind the last that is good."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < len(MAGIC):
            raise Damaged(f"{path} is cut off: it holds {size} bytes")
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    with memory:  # which needs the file no more
        if memory[: len(MAGIC)] != MAGIC:
            raise Damaged(f"{path} is not a schedule of format {FORMAT}")
        yield from _records(memory, size, path)


def _records(memory: mmap.mmap, size: int, path: Path) -> Iterator[list[Any]]:
    at, check, count = len(MAGIC), 0, 0
    while at < size and (length := memory[at]):
        here = f"{path} is damaged at record {count} (byte {at})"
        begin = at + HEAD
        if length == ESCAPE:
            length = int.from_bytes(memory[begin : begin + 4], "little")
            begin += 4
        data = memory[begin : begin + length]
        check = crc32(data, check)
        if begin + length > size or (check & 0xFFFF).to_bytes(2, "little") != memory[at + 1 : at + HEAD]:
            raise Damaged(here)
        try:
            record = _decoder.decode(data)
        except msgspec.DecodeError:
            raise Damaged(here) from None
        if not isinstance(record, list):
            raise Damaged(here)
        yield record
        at, count = begin + length, count + 1
    if at < size and memory[size - 1]:  # only an orderly end cuts off what is not used, and that leaves no zero
        raise Damaged(f"{path} is damaged at record {count} (byte {at})")
