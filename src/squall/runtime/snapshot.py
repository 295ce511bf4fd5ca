"""Snapshots: one safetensors file per shard, and a manifest; the directory appears by one atomic rename.

    snapshots/000003/shard-0-of-2.safetensors  weights and optimizer state of the shard's elements
                     shard-1-of-2.safetensors
                     manifest.json             layout, versions, data position

A snapshot can be restored into any number of shards: state is kept by element of the parameter vector.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from squall.errors import SnapshotMismatch
from squall.vector import Layout

KEEP = 2  # older snapshots are removed


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
    final: bool = False  # the run's record tells all that is in it

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


class Part(Protocol):
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
        self.directory = run_directory / "snapshots"

    def write_shard(self, number: int, shard: int, shards: int, store: Part) -> str:
        """Write one shard's file; the reason if that fails (a full disk must not end a training)."""
        path = self._partial(number) / f"shard-{shard}-of-{shards}.safetensors"
        range_ = {"start": str(store.start), "stop": str(store.stop)}
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            save_file({k: v.detach().contiguous() for k, v in store.state().items()}, path, metadata=range_)
            os.chmod(path, 0o600)
        except Exception as error:  # safetensors has an error type of its own for a full disk
            shutil.rmtree(path.parent, ignore_errors=True)  # half a snapshot is of no use, and takes room
            return f"{type(error).__name__}: {error}"
        return ""

    def publish(self, manifest: Manifest) -> Path:
        """All shards have written: make the snapshot visible and remove old ones. Raises `OSError`."""
        partial, final = self._partial(manifest.number), self.directory / f"{manifest.number:06d}"
        (partial / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        partial.rename(final)
        self.discard_partial()  # of an attempt that failed
        for number in self.numbers()[:-KEEP]:
            shutil.rmtree(self.directory / f"{number:06d}", ignore_errors=True)
        return final

    def numbers(self) -> list[int]:
        """Complete snapshots, oldest first."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdecimal())

    def newest(self) -> int | None:
        """The one to go on from; None: the run died before its first. What is half-written is removed."""
        self.discard_partial()
        return max(self.numbers(), default=None)

    def manifest(self, number: int) -> Manifest:
        path = self.directory / f"{number:06d}" / "manifest.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Manifest)
        except (OSError, msgspec.DecodeError) as error:
            raise _unreadable(path, error) from error

    def check(self, number: int, layout: Layout) -> Manifest:
        """Raises `SnapshotMismatch`, with the tensors that differ, unless the snapshot fits this layout."""
        manifest = self.manifest(number)
        differences = layout.differences(manifest.layout)
        if differences:
            shown = "\n  ".join(differences[:20])
            more = f"\n  and {len(differences) - 20} more" if len(differences) > 20 else ""
            raise SnapshotMismatch(f"snapshot {number} in {self.directory} belongs to another model:\n  {shown}{more}")
        for path in self._files(manifest):
            _check_file(path)
        return manifest

    def restore(self, number: int, layout: Layout) -> Restored:
        """Read a snapshot for a model with this layout. Raises `SnapshotMismatch`."""
        manifest = self.check(number, layout)
        tensors: dict[str, Tensor] = {}
        for path in self._files(manifest):
            _read_shard(path, layout.length, tensors)
        return Restored(manifest, tensors)

    def discard_partial(self) -> None:
        """Remove what a run that died left half-written."""
        if self.directory.is_dir():
            for path in self.directory.glob("*.partial"):
                shutil.rmtree(path, ignore_errors=True)

    def _files(self, manifest: Manifest) -> list[Path]:
        shards = len(manifest.versions)
        directory = self.directory / f"{manifest.number:06d}"
        return [directory / f"shard-{shard}-of-{shards}.safetensors" for shard in range(shards)]

    def _partial(self, number: int) -> Path:
        return self.directory / f"{number:06d}.partial"


def _check_file(path: Path) -> None:
    try:
        with safe_open(path, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> SnapshotMismatch:
    remedy = f"remove {path.parent} to go on from the snapshot before it, if there is one"
    return SnapshotMismatch(f"{path} cannot be read ({error}): {remedy}")


def _read_shard(path: Path, length: int, tensors: dict[str, Tensor]) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    put_together(state, int(metadata["start"]), int(metadata["stop"]), length, tensors)


def put_together(state: Mapping[str, Tensor], first: int, last: int, length: int, tensors: dict[str, Tensor]) -> None:
    """Put what the shard of elements [first, last) holds into tensors of the whole vector, which has `length`."""
    tensors.setdefault("weights", torch.zeros(length))[first:last] = state["weights"]
    for name, value in state.items():
        if name == "weights":
            continue
        group, start, stop, key = name.split(":", 3)
        whole = f"{group}:{key}"
        if value.ndim == 0:
            tensors[whole] = value
        else:
            if whole not in tensors:
                tensors[whole] = torch.zeros(length, dtype=value.dtype)
            tensors[whole][int(start) : int(stop)] = value
