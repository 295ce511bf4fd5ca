"""All that a shard is, as it travels to its backup: a file in the scratch directory of each of the two machines.

    state        uint8, what its machine is (`protocol.copied`)
    vectors      uint8, the memory of those of Sandblaster (`runtime.vectors`); else there are
    updates      int64 [1], that the numbers have
    numbers      uint8, as they lie in `Legacy.numbers`
    weights      float32 [shard elements]
    fetched      float32 [slots, shard elements], as in `Store`, if that has them
    gradient.1.0 float32 [shard elements], what waits in a buffer of a replica's slot, and the same of others

On one machine the backup reads the file that the shard has written. Between two the bytes of one file are sent, and
received into the other.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from squall.protocol.copied import Copied
from squall.protocol.effects import Payload
from squall.protocol.events import CopyKnown
from squall.protocol.nodes import Node
from squall.runtime.arena import Arena, Shape
from squall.runtime.legacy import Numbers
from squall.runtime.store import Store

BESIDE_BYTES = 1 << 26  # at most, beside numbers: the state, names, and where the tensors are
PROTOCOL = "squall.protocol."
STATE_BYTES = 1 << 12  # of an element's weights and optimizer state, at most


def bytes_at_most(elements: int, shape: Shape) -> int:
    """Of the file of a shard: more is none."""
    return BESIDE_BYTES + elements * (STATE_BYTES + 4 * shape.replicas * shape.gradients)


def path_of(scratch: Path, backup: Node) -> Path:
    return scratch / f"whole-{backup}"


def packed(scratch: Path, backup: Node, tensors: Mapping[str, Tensor], most: int) -> CopyKnown:
    """In a file for the backup, in the place of those for backups before it. Of no size where that cannot be.

    One that is still on its way is mapped, and is not lost with its name.
    """
    for older in scratch.glob(f"whole-{backup.role}-{backup.index}.*"):
        older.unlink(missing_ok=True)
    path = path_of(scratch, backup)
    try:
        save_file(dict(tensors), path)
        path.chmod(0o600)
        if (size := path.stat().st_size) <= most:
            return CopyKnown(backup, size)
        why = f"it takes {size / 1e9:.1f} GB"
    except Exception as error:  # safetensors has an error type of its own for a full disk
        why = f"{type(error).__name__}: {error}"
    path.unlink(missing_ok=True)
    sys.stderr.write(f"squall: warning: {backup.role} {backup.index} cannot be given all that it needs: {why}\n")
    return CopyKnown(backup, 0)


def of_machine(state: bytes) -> dict[str, Tensor]:
    """In the file of every shard."""
    return {"state": torch.frombuffer(bytearray(state), dtype=torch.uint8)}


def of_shard(store: Store, numbers: Numbers, updates: int, lying: Iterable[Payload]) -> dict[str, Tensor]:
    """What is in the file of a shard, whose numbers have so many updates. `lying`: pushes that wait."""
    tensors = {
        "updates": torch.tensor([updates]),
        "numbers": numbers.image,
        "weights": store.weights,
    }
    if store.fetched is not None:
        tensors["fetched"] = store.fetched
    for each in lying:
        name = f"{each.kind}.{each.slot}.{each.buffer}"
        tensors[name] = store.arena.gradient(each.slot, each.buffer)[store.start : store.stop].clone()
    return tensors


class Whole(NamedTuple):
    """What a file has."""

    state: bytes
    tensors: Mapping[str, Tensor]

    def put(self, weights: Tensor, numbers: Numbers, before: int) -> None:
        """Into a backup, of whose numbers `before` updates are from an earlier attempt."""
        weights.copy_(self.tensors["weights"])
        numbers.take_up(self.tensors["numbers"], int(self.tensors["updates"]) - before)

    def lay(self, arena: Arena, start: int, stop: int) -> None:
        """Into the arena of another machine."""
        for name, value in self.tensors.items():
            kind, _, place = name.partition(".")
            if kind == "gradient":
                slot, buffer = map(int, place.split("."))
                arena.gradient(slot, buffer)[start:stop].copy_(value)


def read(path: Path) -> Whole:
    """And remove it."""
    tensors = load_file(path)
    path.unlink()
    return Whole(tensors.pop("state").numpy().tobytes(), tensors)


class _Known(pickle.Unpickler):
    """Of what machines are made of, and some classes beside it: what is read comes from another machine."""

    def __init__(self, data: bytes, classes: Iterable[type]) -> None:
        super().__init__(io.BytesIO(data))
        self._classes = {(each.__module__, each.__qualname__): each for each in classes}

    def find_class(self, module: str, name: str) -> type:
        if (beside := self._classes.get((module, name))) is not None:
            return beside
        found = super().find_class(module, name) if module.startswith(PROTOCOL) else None
        if not (isinstance(found, type) and found.__module__.startswith(PROTOCOL)):
            raise pickle.UnpicklingError(f"{module}.{name} is in no such state")
        return found


def known(data: bytes, classes: Iterable[type]) -> object:
    """What was pickled, of what machines are made of and these classes. Raises anything for what is none of that."""
    return _Known(data, classes).load()


def machine(state: bytes) -> Copied:
    """Raises anything for what is none."""
    found = known(state, (deque,))
    if not isinstance(found, Copied):
        raise TypeError(f"{type(found).__name__} is no machine that is copied")
    return found


def view(scratch: Path, payload: Payload, most: int, *, sends: bool) -> memoryview:
    """The bytes of the file. Raises `ValueError` for a size that none has, `OSError` where there is no room for it."""
    path, size = path_of(scratch, payload.owner), payload.buffer
    if not 0 < size <= most:
        raise ValueError(f"no shard is of {size} bytes")
    if sends:
        with open(path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return memoryview(mmap.mmap(file.fileno(), size))
