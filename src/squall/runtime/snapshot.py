"""Snapshots: one safetensors file per shard, and a manifest; the directory appears by one atomic rename.

    snapshots/000003/shard-0-of-2.safetensors  weights and optimizer state of the shard's elements
                     shard-1-of-2.safetensors
                     manifest.json             layout, versions, data position, and a checksum of each file

All of it is on the disk before the rename, and the rename before older snapshots are removed. One whose checksums are
others now is no snapshot any more: `newest` puts it aside and goes back to the one before. A snapshot can be restored
into any number of shards: state is kept by element of the parameter vector.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from zlib import crc32

import msgspec
import torch
from msgspec import UNSET, UnsetType
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from squall.errors import SnapshotMismatch
from squall.protocol.events import SnapshotWritten
from squall.record.rows import KEEP
from squall.runtime.states import by_element, put_together
from squall.vector import Layout

SNAPSHOTS = "snapshots"  # folder in the run's directory
NO_LINKS = (errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EMLINK)  # what file systems say that have none, or no more


class Manifest(msgspec.Struct, frozen=True):
    """What a snapshot holds, besides numbers."""

    number: int
    layout: Layout
    versions: tuple[int, ...]  # updates applied, by shard
    ledger: dict[str, object]  # `Leases.state()` of the moment the snapshot was asked for
    progress: dict[str, int]  # lease -> upto, trained since then and in every shard's file
    asked_s: float  # training time of that moment
    trained_s: float  # training time of the snapshot
    optimizer: str  # the class whose state the files hold
    checksums: tuple[int, ...] = ()  # CRC-32 of each shard's file
    final: bool = False  # the run's record tells all that is in it
    examples: tuple[int, ...] | UnsetType = UNSET  # behind each version; an older version of Squall has not told
    rows: bytes | UnsetType = UNSET  # of the record, which could not be written then: `Record.waiting`
    checksum: int = 0  # CRC-32 of all this, with 0 in this place

    def encoded(self) -> bytes:
        plain = msgspec.json.encode(msgspec.structs.replace(self, checksum=0))
        return msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(self, checksum=crc32(plain))))

    @property
    def intact(self) -> bool:
        return self.checksum == crc32(msgspec.json.encode(msgspec.structs.replace(self, checksum=0)))

    def check_optimizer(self, name: str) -> None:
        """Raises `SnapshotMismatch` for another class than the one whose state this is."""
        if name != self.optimizer:
            raise SnapshotMismatch(
                f"snapshot {self.number} holds the state of {self.optimizer}, and the optimizer is {name} now:"
                " resume with the one it had, or start a new run"
            )

    def check_examples(self, examples: int) -> None:
        """Raises `SnapshotMismatch` for another number than the data position is of."""
        before = self.ledger["examples"]
        if examples != before:
            raise SnapshotMismatch(
                f"the training set has {examples} examples, and had {before} when the run began: start a new one"
            )


class DamagedSnapshot(SnapshotMismatch):
    """A file of a snapshot is missing, or holds something else than was written."""


class ShardPart(Protocol):
    """What a shard holds: elements [start, stop) of the vector, and of whatever else has one value for each."""

    start: int
    stop: int

    def state(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class Restored:
    """A snapshot, put together for the whole vector."""

    manifest: Manifest
    tensors: dict[str, Tensor]  # "weights" [length]; "<group>:<key>" [length] or scalar

    @property
    def updates(self) -> int:
        return max(self.manifest.versions)


class Snapshots:
    """The snapshots of one run."""

    def __init__(self, run_directory: Path) -> None:
        self.directory = run_directory / SNAPSHOTS
        self.elsewhere = False  # they are made on another machine

    def write_shard(self, number: int, shard: int, shards: int, store: ShardPart) -> SnapshotWritten:
        """Bring one shard's file onto the disk; the reason if that fails (a full disk must not end a training)."""
        return self.write(number, shard, shards, store.state(), (store.start, store.stop))

    def write(
        self, number: int, shard: int, shards: int, state: Mapping[str, Tensor], span: tuple[int, int]
    ) -> SnapshotWritten:  # fmt: skip
        """Write what somebody holds of elements [start, stop)."""
        path = self.part(number, shard, shards)
        range_ = {"start": str(span[0]), "stop": str(span[1])}
        try:
            self.make_room(number)
            save_file({k: v.detach().contiguous() for k, v in state.items()}, path, metadata=range_)
            os.chmod(path, 0o600)
            sync(path)
            return SnapshotWritten(number, checksum=checksum_of(path))
        except Exception as error:  # safetensors has an error type of its own for a full disk
            shutil.rmtree(path.parent, ignore_errors=True)  # half a snapshot is of no use, and takes room
            return SnapshotWritten(number, f"{type(error).__name__}: {error}")

    def make_room(self, number: int) -> None:
        """Raises `OSError` where the run's directory was removed: it ends, and would not if this made another."""
        for folder in (self.directory, self._partial(number)):
            folder.mkdir(mode=0o700, exist_ok=True)

    def part(self, number: int, shard: int, shards: int) -> Path:
        """A shard's file, until the snapshot is published."""
        return self._partial(number) / f"shard-{shard}-of-{shards}.safetensors"

    def publish(self, manifest: Manifest) -> Path:
        """All shards have written: make the snapshot visible and remove old ones. Raises `OSError`.

        One that is visible already was made so by a coordinator that died before it could say so.
        """
        partial, final = self._partial(manifest.number), self.directory / f"{manifest.number:06d}"
        if manifest.number > max(self.numbers(), default=0):
            (partial / "manifest.json").write_bytes(manifest.encoded())
            sync(partial / "manifest.json")
            sync(partial)
            partial.rename(final)
        sync(self.directory)
        self.discard_partial()  # of an attempt that failed
        for number in self.numbers()[:-KEEP]:
            shutil.rmtree(self.directory / f"{number:06d}", ignore_errors=True)
        return final

    def visible(self, number: int) -> Path:
        """Of a snapshot that was to be published. Raises `FileNotFoundError` if it was not; later ones were."""
        path = self.directory / f"{number:06d}"
        if not self.elsewhere and number not in self.numbers() and number + KEEP > max(self.numbers(), default=0):
            raise FileNotFoundError(path)
        return path

    def numbers(self) -> list[int]:
        """Complete snapshots, oldest first."""
        return sorted(int(path.name) for path in self.directory.glob("*") if path.name.isdecimal())

    def newest(self) -> int | None:
        """The one to go on from; None: the run died before its first. What is half-written is removed.

        Damaged ones are put aside, with a warning, where one before is whole. Raises `DamagedSnapshot` where none is.
        """
        self.discard_partial()
        damaged: dict[int, DamagedSnapshot] = {}
        for number in reversed(self.numbers()):
            try:
                self._check_files(self.manifest(number))
            except DamagedSnapshot as error:
                damaged[number] = error
                continue
            for bad, why in damaged.items():
                aside = self.directory / f"{bad:06d}.damaged"  # its number will be given again
                shutil.rmtree(aside, ignore_errors=True)
                (self.directory / f"{bad:06d}").rename(aside)
                sys.stderr.write(f"squall: warning: {why}: going on from snapshot {number}, which is whole\n")
            return number
        for why in damaged.values():
            raise DamagedSnapshot(f"{why}: restore it from a copy, or start a new run (there is no older snapshot)")
        return None

    def manifest(self, number: int) -> Manifest:
        """Raises `DamagedSnapshot`."""
        path = self.directory / f"{number:06d}" / "manifest.json"
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except (OSError, msgspec.DecodeError) as error:
            raise _unreadable(path, error) from error
        if not manifest.intact:
            raise DamagedSnapshot(f"{path} is damaged, or of an older version of Squall: its checksum is another")
        return manifest

    def check(self, number: int, layout: Layout) -> Manifest:
        """Raises `SnapshotMismatch`, with the tensors that differ, unless the snapshot fits this layout."""
        manifest = self.manifest(number)
        differences = layout.differences(manifest.layout)
        if differences:
            shown = "\n  ".join(differences[:20])
            more = f"\n  and {len(differences) - 20} more" if len(differences) > 20 else ""
            raise SnapshotMismatch(f"snapshot {number} in {self.directory} belongs to another model:\n  {shown}{more}")
        return manifest

    def restore(self, number: int, layout: Layout) -> Restored:
        """Read a snapshot for a model with this layout. Raises `SnapshotMismatch`, or `DamagedSnapshot`."""
        manifest = self.check(number, layout)
        self._check_files(manifest)
        tensors: dict[str, Tensor] = {}
        for path in self._files(manifest):
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
            put_together(state, int(metadata["start"]), int(metadata["stop"]), layout.length, tensors)
        return Restored(manifest, by_element(tensors, layout))

    def weights(self, number: int) -> Tensor:
        """The whole vector of a snapshot. Raises `DamagedSnapshot`."""
        manifest = self.manifest(number)
        self._check_files(manifest)
        weights = torch.zeros(manifest.layout.length)
        for path in self._files(manifest):
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                weights[int(metadata["start"]) : int(metadata["stop"])] = file.get_tensor("weights")
        return weights

    def discard_partial(self) -> None:
        """Remove what a run that died left half-written."""
        for path in self.directory.glob("*.partial"):
            shutil.rmtree(path, ignore_errors=True)

    def _check_files(self, manifest: Manifest) -> None:
        for path, checksum in zip(self._files(manifest), manifest.checksums, strict=True):
            try:
                found = checksum_of(path)
            except OSError as error:
                raise _unreadable(path, error) from error
            if found != checksum:
                raise DamagedSnapshot(f"{path} is damaged: its checksum is {found:08x}, and was {checksum:08x}")

    def _files(self, manifest: Manifest) -> list[Path]:
        shards = len(manifest.versions)
        directory = self.directory / f"{manifest.number:06d}"
        return [directory / f"shard-{shard}-of-{shards}.safetensors" for shard in range(shards)]

    def _partial(self, number: int) -> Path:
        return self.directory / f"{number:06d}.partial"


def _unreadable(path: Path, error: Exception) -> SnapshotMismatch:
    """What this user may not read may be whole."""
    kind = SnapshotMismatch if isinstance(error, PermissionError) else DamagedSnapshot
    return kind(f"{path} cannot be read ({error})")


def checksum_of(path: Path) -> int:
    """CRC-32 of a file."""
    checksum, piece = 0, memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(piece):
            checksum = crc32(piece[:size], checksum)
    return checksum


def second_name(file: Path, name: Path) -> None:
    """It costs nothing, and stays when the file is removed or another takes its place. Raises `OSError`."""
    try:
        os.link(file, name)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copy(file, name)
        os.chmod(name, 0o600)


def sync(path: Path) -> None:
    """Return when the file, or what a directory names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
