"""A node's schedule: the stream of effects that its host carried out, in a file that outlives the process.

    schedule/0/start.json     what the attempt began from; 0 is a fresh run, and every resume adds the next number
               shard-0.0      updates applied, with the pushes in each; weights sent to replicas; snapshots
               replica-1.0    batches computed, pushes, and fetched weights taken into use
               replica-1.1    of the process that replaced it; of all-reduce: groups joined, and steps taken in them
               packed-...     what a long file has had before, compressed

(`runtime.replay_starts` has what is there beside where a run keeps the end of its schedule alone.)

A file is `MAGIC`, four bytes that say how many pieces of it are packed, then records: one byte of length (0: the end;
255: four bytes of length follow behind the checksum), two bytes of a checksum that runs on over all records, and a
msgpack list (`runtime.records` knows of what). It is written through a mapping, so a record costs no system call and
survives the death of its process; the length is stored last, so a record is there as a whole or not at all. Room is
reserved in steps, and what is not used is cut off at an orderly end. A length of zero is the end; what lies behind it
is a record that the process was killed over.

A file that has grown to `PIECE` is compressed into its packed file, behind four bytes of the piece's length there, and
begins anew. A process that is killed over that leaves a piece in both, or half of one: the number in the file tells.
"""

from __future__ import annotations

import contextlib
import lzma
import math
import mmap
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

FORMAT = 3
MAGIC = b"SQUALL\x00" + bytes((FORMAT,))
BEGIN = len(MAGIC) + 4  # of the first record
HEAD = 3  # bytes before a record: length, checksum
ESCAPE = 255
FIRST_BYTES, PIECE = 1 << 12, 1 << 20  # a file doubles from the first to the second

APPLIED, DELIVERED, SAVED, COMPUTED, SKIPPED, CONTINUED, PUSHED, PREPARED, USED, ENDED = range(10)
CALCULATED, ADDED, KEPT = range(10, 13)  # Sandblaster's
PART = 13
FORMED, STEPPED, MOVED = range(14, 17)  # all-reduce's
SUCCEEDED, WENT_BACK = 17, 18

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder()


class Damaged(Exception):
    """A schedule cannot be read on. The message names the file and the record."""


class ScheduleWriter:
    """The schedule of one node, being written. It ends when the disk is full, or when it has `at_most` bytes.

    It does so with a warning, and training goes on; what is there is replayed. A mapping holds a descriptor of its own,
    and no other is held: a simulated run has hundreds of nodes in one process.
    """

    def __init__(self, path: Path, at_most: float = math.inf, goes_on: bool = False) -> None:
        """`goes_on`: behind what a process has written that has died."""
        self._path = path
        self._at_most = at_most
        self._packed = 0  # pieces
        self._packed_bytes = 0
        self._memory: mmap.mmap | None = None
        self._size = 0  # bytes reserved
        self._at = BEGIN  # where the next record goes
        self._check = 0
        try:
            if goes_on:
                self._go_on()
                return
            self._grow(0, os.O_CREAT | os.O_EXCL)
        except OSError as error:
            self._give_up(error)
        else:
            assert self._memory is not None
            self._memory[: len(MAGIC)] = MAGIC

    @property
    def long(self) -> bool:
        """It has a packed file."""
        return self._packed > 0

    def add(self, record: list[object]) -> None:
        data = _encode(record)
        size, at = len(data), self._at
        if at + HEAD + 4 + size >= self._size:
            if self._memory is None:
                return
            try:
                if self._size >= PIECE and at > BEGIN:
                    self._pack()
                if self._at + HEAD + 4 + size >= self._size:
                    self._grow(HEAD + 4 + size)
            except OSError as error:
                self._give_up(error)
                return
            at = self._at
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
        """Reserve more room, so that a full disk is an error here, and not a signal that kills at the next record."""
        size = self._size + max(needed, self._size, FIRST_BYTES)
        file = os.open(self._path, os.O_RDWR | flags, 0o600)
        try:
            os.posix_fallocate(file, self._size, size - self._size)
            if self._memory is not None:
                self._memory.close()
            self._memory = mmap.mmap(file, size)
        finally:
            os.close(file)
        self._size = size

    def _go_on(self) -> None:
        self._size = os.stat(self._path).st_size
        file = os.open(self._path, os.O_RDWR)
        try:
            self._memory = memory = mmap.mmap(file, self._size)
        finally:
            os.close(file)
        self._packed = int.from_bytes(memory[len(MAGIC) : BEGIN], "little")
        pieces, self._packed_bytes = _whole_pieces(packed(self._path))
        if packed(self._path).exists():
            os.truncate(packed(self._path), self._packed_bytes)  # half a piece, perhaps
        if pieces > self._packed:  # what is here is in the last one
            return self._clear(memory)
        for _, begin, end in _spans(memory, self._size, BEGIN, HEAD):
            self._check, self._at = crc32(memory[begin:end], self._check), end
        memory[self._at :] = bytes(self._size - self._at)  # half a record, perhaps

    def _pack(self) -> None:
        """Move the records into the packed file. Killed at any moment, the process leaves each in one of the two."""
        memory = self._memory
        assert memory is not None
        piece = lzma.compress(_bare(memory, self._at), preset=0)
        self._packed_bytes += 4 + len(piece)
        if self._packed_bytes + PIECE > self._at_most:
            raise OSError(0, "it has the size that --keep-schedule leaves it")
        with open(packed(self._path), "ab", opener=partial(os.open, mode=0o600)) as file:
            file.write(len(piece).to_bytes(4, "little") + piece)
        self._clear(memory)

    def _clear(self, memory: mmap.mmap) -> None:
        memory[BEGIN:] = bytes(self._size - BEGIN)
        self._packed += 1
        memory[len(MAGIC) : BEGIN] = self._packed.to_bytes(4, "little")
        self._at, self._check = BEGIN, 0

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


def packed(path: Path) -> Path:
    """Where the pieces of a long file are."""
    return path.with_name(f"packed-{path.name}")


def read(path: Path) -> Iterator[list[Any]]:
    """The records of a file, as they were given to `Log.add`. Raises `Damaged` behind the last that is good."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < BEGIN:
            raise Damaged(f"{path} is cut off: it holds {size} bytes")
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    with memory:  # which needs the file no more
        if memory[: len(MAGIC)] != MAGIC:
            raise Damaged(f"{path} is not a schedule of format {FORMAT}")
        pieces = int.from_bytes(memory[len(MAGIC) : BEGIN], "little")
        found = 0
        for piece in _pieces(packed(path)):
            yield from piece
            found += 1
        if found < pieces:
            raise Damaged(f"{path} is without what went before: {packed(path)} holds {found} of {pieces} pieces")
        if found == pieces:  # else its process was killed when it had packed this
            yield from _records(memory, size, path)


def _bare(memory: mmap.mmap, stop: int) -> bytes:
    """Records without their checksums, which nothing makes small: what they are compressed into has one."""
    return b"".join(memory[at : at + 1] + memory[at + HEAD : end] for at, _, end in _spans(memory, stop, BEGIN, HEAD))


def _pieces(path: Path) -> Iterator[Iterator[list[Any]]]:
    """The records of each, but for one that is cut off."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        while len(head := file.read(4)) == 4:
            length = int.from_bytes(head, "little")
            if len(piece := file.read(length)) < length:
                return
            try:
                bare = lzma.decompress(piece)
            except lzma.LZMAError as error:
                raise Damaged(f"{path} is damaged: {error}") from None
            yield (_decoder.decode(bare[begin:end]) for _, begin, end in _spans(bare, len(bare), 0, 1))


def _whole_pieces(path: Path) -> tuple[int, int]:
    """How many are there, and bytes of all of them."""
    count = end = 0
    if path.exists():
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while len(head := file.read(4)) == 4 and (stop := end + 4 + int.from_bytes(head, "little")) <= size:
                count, end = count + 1, file.seek(stop)
    return count, end


def _spans(data: mmap.mmap | bytes, stop: int, at: int, head: int) -> Iterator[tuple[int, int, int]]:
    """Where each record has its head, of so many bytes, where what it says begins, and where that ends."""
    while at < stop and (length := data[at]):
        begin = at + head
        if length == ESCAPE:
            length, begin = int.from_bytes(data[begin : begin + 4], "little"), begin + 4
        yield at, begin, begin + length
        at = begin + length


def _records(memory: mmap.mmap, size: int, path: Path) -> Iterator[list[Any]]:
    check, count, end = 0, 0, BEGIN
    for at, begin, end in _spans(memory, size, BEGIN, HEAD):
        here = f"{path} is damaged at record {count} (byte {at})"
        data = memory[begin:end]
        check = crc32(data, check)
        if end > size or (check & 0xFFFF).to_bytes(2, "little") != memory[at + 1 : at + HEAD]:
            raise Damaged(here)
        try:
            record = _decoder.decode(data)
        except msgspec.DecodeError:
            raise Damaged(here) from None
        if not isinstance(record, list):
            raise Damaged(here)
        yield record
        count += 1
    if end < size and memory[size - 1]:  # only an orderly end cuts off what is not used, and that leaves no zero
        raise Damaged(f"{path} is damaged at record {count} (byte {end})")
