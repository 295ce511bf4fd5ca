"""Snapshot files of shards and replicas on their way to the coordinator's machine: read there, written here."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from squall.protocol.effects import Effect, Payload, WritePiece, WriteSnapshot
from squall.protocol.events import Event, PieceWritten, SnapshotWritten
from squall.protocol.messages import PIECE_BYTES
from squall.protocol.nodes import Node
from squall.runtime.driver import Host, HostAround
from squall.runtime.legacy import shared_memory
from squall.runtime.snapshot import Snapshots, sync

_WHOSE = 8
Part = Callable[[], tuple[int, int]]


class Pieces:
    """Where a piece lies that travels, by shard or replica: PIECE_BYTES; the last piece of a file takes a part.

    On the coordinator's machine also what lies there until it is known that it was asked for.
    """

    def __init__(self) -> None:
        self._views: dict[int, memoryview] = {}
        self._shown: dict[Node, memoryview] = {}
        self._rooms: list[memoryview] = []  # for what replicas show, by slot; before it whose it is: incarnation + 1

    def outlive(self, senders: int, size: int) -> None:
        """Have what comes of so many shards or replicas, which show so many bytes, outlive the process that reads it.

        To be called before that is forked.
        """
        self._views = {sender: memoryview(shared_memory(PIECE_BYTES)) for sender in range(senders)}
        self._rooms = [memoryview(shared_memory(_WHOSE + size)) for _ in range(senders)]

    def recall(self) -> None:
        """In a process that goes on in another's place."""
        for slot, room in enumerate(self._rooms):
            if incarnation := room[:_WHOSE].cast("q")[0]:
                self._shown[Node("replica", slot, incarnation - 1)] = room[_WHOSE:]

    def view(self, shard: int) -> memoryview:
        if shard not in self._views:
            self._views[shard] = memoryview(bytearray(PIECE_BYTES))
        return self._views[shard]

    def room(self, replica: Node, size: int) -> memoryview:
        """For the weights that a replica on another machine shows: the same bytes each time."""
        if replica not in self._shown:
            shared = self._rooms[replica.index] if self._rooms else memoryview(bytearray(_WHOSE + size))
            shared[:_WHOSE].cast("q")[0] = replica.incarnation + 1
            self._shown[replica] = shared[_WHOSE : _WHOSE + size]
        return self._shown[replica]

    def take(self, replica: Node) -> memoryview | None:
        """What it has shown; what others have is dropped."""
        self._shown = {node: shown for node, shown in self._shown.items() if node == replica}
        return self._shown.get(replica)


class FarShardHost(HostAround):
    """A shard, or replica, whose machine is not the coordinator's: its files are written here and have to travel."""

    def __init__(self, host: Host, directory: Path, own: int, part: Part, pieces: Pieces) -> None:
        """`own` is its number; `part` says which part of a snapshot it writes, and of how many."""
        super().__init__(host)
        self._snapshots = Snapshots(directory)
        self._own, self._part = own, part
        self._pieces = pieces
        # Its name is gone: another shard here that has no room for its file removes all that there are.
        self._written: FileIO | None = None
        self._path = directory  # that it had

    def attach(self, payload: Payload) -> None:
        if payload.kind != "piece":
            super().attach(payload)
            return
        assert self._written is not None
        self._written.seek(payload.clock * PIECE_BYTES)
        self._written.readinto(self._pieces.view(self._own))

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, WriteSnapshot) and self._written is not None:
            self._written.close()  # it has arrived, or its snapshot was given up
            with suppress(OSError):  # not before: another shard of this machine may be about to write there
                self._path.parent.rmdir()
        event = super().perform(effect, now)
        if not isinstance(event, SnapshotWritten) or event.error:
            return event
        self._path = self._snapshots.part(event.number, *self._part())
        try:
            self._written = FileIO(self._path)
            self._path.unlink()
        except OSError as error:
            return SnapshotWritten(event.number, str(error))
        return SnapshotWritten(event.number, checksum=event.checksum, size=os.fstat(self._written.fileno()).st_size)


class PiecesHost(HostAround):
    """The coordinator's, which writes the pieces that come from other machines."""

    def __init__(self, host: Host, directory: Path, pieces: Pieces) -> None:
        super().__init__(host)
        self._snapshots = Snapshots(directory)
        self._pieces = pieces

    def perform(self, effect: Effect, now: float) -> Event | None:
        if not isinstance(effect, WritePiece):
            return super().perform(effect, now)
        piece, error = effect.piece, ""
        path = self._snapshots.part(piece.number, effect.part, effect.parts)
        try:
            self._snapshots.make_room(piece.number)
            flags = os.O_WRONLY | os.O_CREAT | (0 if piece.start else os.O_TRUNC)
            with open(os.open(path, flags, 0o600), "wb") as file:
                file.seek(piece.start)
                file.write(self._pieces.view(effect.shard)[: piece.size])
            if piece.start + piece.size == piece.total:
                sync(path)
        except OSError as problem:
            error = str(problem)
        return PieceWritten(effect.part, piece.number, error)
