"""A shard's snapshot file comes to the coordinator's machine in pieces, whole, or with the reason why not."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from squall.protocol.effects import Effect, Payload, Transmit, WritePiece, WriteSnapshot
from squall.protocol.events import Event, FrameArrived, MessageArrived, PieceWritten, SnapshotWritten, Started
from squall.protocol.exchanges import Exchanges
from squall.protocol.frames import Frame
from squall.protocol.loss_messages import SnapshotLost
from squall.protocol.messages import PIECE_BYTES, PieceKept, SnapshotPiece, SnapshotTaken, TakeSnapshot
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.shard import Shard
from squall.protocol.speaking import LOOP, places_of
from squall.protocol.succession import Journaled, steps
from squall.runtime.arena import Shape
from squall.runtime.driver import Host
from squall.runtime.journal import Journal
from squall.runtime.pieces import FarShardHost, Pieces, PiecesHost
from squall.runtime.places import Places
from squall.runtime.ranges import Ranges
from squall.runtime.snapshot import Snapshots, checksum_of
from squall.vector import Layout

ELEMENTS = 5 * PIECE_BYTES // 8  # two and a half pieces of float32
SHARD, SHARDS = 1, 2
FAR = Node("shard", SHARD)
LAYOUT = Layout((), (), (), SHARDS * ELEMENTS, SHARDS * ELEMENTS)
SHAPE = Shape(length=LAYOUT.length, replicas=1)


class Part:
    """A shard's numbers."""

    start, stop = ELEMENTS, 2 * ELEMENTS

    def state(self) -> dict[str, Tensor]:
        return {"weights": torch.arange(ELEMENTS, dtype=torch.float32)}


class Writer(Host):
    def __init__(self, directory: Path) -> None:
        self.snapshots = Snapshots(directory)

    def perform(self, effect: Effect, now: float) -> Event | None:
        assert isinstance(effect, WriteSnapshot)
        return self.snapshots.write_shard(effect.number, SHARD, SHARDS, Part())


class Machines:
    """The shard's machine, with its protocol machine, and the coordinator's; payloads are copied between them."""

    def __init__(self, tmp_path: Path) -> None:
        self.there, self.here = tmp_path / "there", tmp_path / "here"
        self.there.mkdir()
        self.here.mkdir()
        self.sent, self.received = Pieces(), Pieces()
        self.far = FarShardHost(Writer(self.there), self.there, SHARD, lambda: (SHARD, SHARDS), self.sent)
        self.kept = PiecesHost(Writer(self.here), self.here, self.received)
        self.shard = Shard(SHARD, Exchanges())
        self.pieces: list[SnapshotPiece] = []
        self.travelled = 0  # bytes

    def take(self, number: int) -> SnapshotTaken:
        [write] = self.shard.on(MessageArrived(COORDINATOR, TakeSnapshot(number)), 0.0)
        written = self.far.perform(write, 0.0)
        assert isinstance(written, SnapshotWritten)
        [said] = self.shard.on(written, 0.0)
        while isinstance(said.message, SnapshotPiece):  # type: ignore[attr-defined]
            [said] = self.shard.on(MessageArrived(COORDINATOR, self.carry(said)), 0.0)
        assert isinstance(said.message, SnapshotTaken)  # type: ignore[attr-defined]
        return said.message  # type: ignore[attr-defined,no-any-return]

    def carry(self, said: Any) -> PieceKept:
        assert [said.payload] == places_of(LOOP, FAR, COORDINATOR, said.message, said.payload)
        self.pieces.append(said.message)
        self.far.attach(said.payload)
        (sent,), (received,) = (
            Places(node, SHARDS, Ranges(LAYOUT, SHARDS), SHAPE, memoryview(b""), pieces)(said.payload, peer)
            for node, peer, pieces in ((FAR, COORDINATOR, self.sent), (COORDINATOR, FAR, self.received))
        )
        received[:] = sent
        self.travelled += sent.nbytes
        stored = self.kept.perform(WritePiece(SHARD, said.message, SHARD, SHARDS), 0.0)
        assert isinstance(stored, PieceWritten)
        return PieceKept(stored.number, stored.error)


def test_a_file_arrives_whole(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    taken = machines.take(3)
    arrived = Snapshots(machines.here).part(3, SHARD, SHARDS)
    assert (taken.error, taken.checksum) == ("", checksum_of(arrived))
    assert [piece.start for piece in machines.pieces] == [0, PIECE_BYTES, 2 * PIECE_BYTES]
    assert machines.travelled == arrived.stat().st_size, "a slow link brings nothing that nobody needs"
    assert arrived.stat().st_mode & 0o777 == 0o600
    machines.take(4)
    assert not Snapshots(machines.there).part(3, SHARD, SHARDS).parent.exists()  # what has arrived takes no room


def test_shards_of_one_machine_leave_each_others_files_alone(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    machines.take(3)
    Snapshots(machines.there).part(3, 0, SHARDS).touch()  # the other one writes its file later
    others = Snapshots(machines.there).part(4, 0, SHARDS)
    others.parent.mkdir()
    others.touch()  # which is on its way
    machines.take(4)
    assert others.exists()


def test_what_is_on_its_way_outlives_the_failure_of_another_shard_here(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    attach = machines.far.attach

    def attach_beside_a_failure(payload: Payload) -> None:
        shutil.rmtree(machines.there / "snapshots")  # as who cannot write its file does
        attach(payload)
        (machines.there / "snapshots").mkdir()

    machines.far.attach = attach_beside_a_failure  # type: ignore[method-assign]
    assert machines.take(3).error == ""


def test_a_disk_that_takes_no_more_is_the_snapshots_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(tmp_path)
    (machines.here / "snapshots").write_text("in the way")
    taken = machines.take(3)
    assert "snapshots" in taken.error
    assert len(machines.pieces) == 1
    (machines.here / "snapshots").unlink()
    assert machines.take(4).error == ""


def test_a_disk_that_is_full_in_the_middle_of_the_last_piece_is_told(tmp_path: Path) -> None:
    """The kernel writes what there is room for and calls that well."""
    kept = PiecesHost(Writer(tmp_path), tmp_path, Pieces())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PIECE_BYTES // 2, before[1]))
    try:
        stored = kept.perform(WritePiece(SHARD, SnapshotPiece(1, 0, PIECE_BYTES, PIECE_BYTES), SHARD, SHARDS), 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(stored, PieceWritten)
    assert "File too large" in stored.error


@pytest.mark.parametrize("came", [0, 1])
def test_a_file_of_which_its_shard_dies_is_asked_for_anew(came: int) -> None:
    """Its successor has none of it: it sends no further piece, though nobody has acknowledged the last one."""
    journal = Journal(memory := bytearray(Journal.size()))
    first = Journaled(Shard(SHARD, Exchanges()), journal)
    asked = FrameArrived(COORDINATOR, Frame(1, 0, TakeSnapshot(3)))
    events = [Started(), asked, SnapshotWritten(3, checksum=9, size=3 * PIECE_BYTES)]
    for event in [*events, *(FrameArrived(COORDINATOR, Frame(2 + i, 1 + i, PieceKept(3))) for i in range(came))]:
        for effect in first.on(event, 0.0):
            first.did(steps(effect))
    again = Journal(memory).succeed().on(Started(), 1.0)
    said = [effect.frame.message for effect in again if isinstance(effect, Transmit) and effect.frame.message]
    assert said
    assert set(said) == {SnapshotLost(3)}
