"""All that a shard is, as it travels to its backup: files in the scratch directory of each of the two machines.

The first one has

    state        uint8, what its machine is (`protocol.copied`)
    vectors      uint8, the memory of those of Sandblaster (`runtime.vectors`), of which nothing follows; else there are
    updates      int64 [1], that the optimizer has made
    outline.0:x  the optimizer's state; what belongs to elements has none of them yet (`Store.outline`)
    gradient.1.0.-1  float32 [elements], what waits in a buffer of a replica's slot: all of the shard's range (-1), or
                 what a part has of it; and the same of others

and each that follows some of the elements, as they are then (`Store.piece`):

    start        int64 [1], the first of them
    weights      float32 [elements of the piece]
    fetched      float32 [slots, elements of the piece], as in `Store`, if that has them
    0:x          the optimizer's state of them

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
from squall.runtime.ranges import Ranges
from squall.runtime.store import Store

BESIDE_BYTES = 1 << 26  # at most, beside numbers: the state, names, and where the tensors are
PROTOCOL = "squall.protocol."
STATE_BYTES = 1 << 12  # of an element's weights and optimizer state, at most


def bytes_at_most(elements: int, shape: Shape) -> int:
    """Of the file of a shard: more is none."""
    return BESIDE_BYTES + elements * (STATE_BYTES + 4 * shape.replicas * shape.gradients)


def path_of(scratch: Path, backup: Node, number: int) -> Path:
    return scratch / f"whole-{backup}-{number}"


def packed(
    scratch: Path, backup: Node, number: int, tensors: Mapping[str, Tensor], most: int, last: bool = True
) -> CopyKnown:  # fmt: skip
    """In a file for the backup, in the place of those before it. Of no size where that cannot be.

    One that is still on its way is mapped, and is not lost with its name.
    """
    for older in scratch.glob(f"whole-{backup.role}-{backup.index}.*"):
        older.unlink(missing_ok=True)
    path = path_of(scratch, backup, number)
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        path.chmod(0o600)
        if (size := path.stat().st_size) <= most:
            return CopyKnown(backup, size, last)
        why = f"it takes {size / 1e9:.1f} GB"
    except Exception as error:  # safetensors has an error type of its own for a full disk
        why = f"{type(error).__name__}: {error}"
    path.unlink(missing_ok=True)
    sys.stderr.write(f"squall: warning: {backup.role} {backup.index} cannot be given all that it needs: {why}\n")
    return CopyKnown(backup, 0)


def of_machine(state: bytes) -> dict[str, Tensor]:
    """In the file of every shard."""
    return {"state": torch.frombuffer(bytearray(state), dtype=torch.uint8)}


def of_shard(store: Store, updates: int) -> dict[str, Tensor]:
    """In the first file of a shard, whose optimizer has made so many updates."""
    outline = {f"outline.{name}": value for name, value in store.outline().items()}
    return {"updates": torch.tensor([updates]), **outline}


def of_pushes(arena: Arena, ranges: Ranges, waiting: Iterable[Payload]) -> dict[str, Tensor]:
    """In the first file of every shard: pushes that wait, or what parts have brought of one."""
    found = {}
    for each in waiting:
        there = [rows.reshape(-1) for rows in ranges(each).of(arena.gradient(each.slot, each.buffer))]
        found[f"gradient.{each.slot}.{each.buffer}.{each.part}"] = torch.cat(there) if there else torch.empty(0)
    return found


def of_piece(store: Store, start: int, stop: int) -> dict[str, Tensor]:
    """In the file of some elements of its own."""
    return {"start": torch.tensor([start]), **store.piece(start, stop)}


class Whole(NamedTuple):
    """What the first file has."""

    state: bytes
    tensors: Mapping[str, Tensor]

    @property
    def updates(self) -> int:
        return int(self.tensors["updates"])

    @property
    def outline(self) -> dict[str, Tensor]:
        of_outline = (name.partition(".") for name in self.tensors)
        return {rest: self.tensors[f"{kind}.{rest}"] for kind, _, rest in of_outline if kind == "outline"}

    def lay(self, arena: Arena, ranges: Ranges, shard: int) -> None:
        """Its pushes, into the arena of another machine. Raises `ValueError` for what has no place there."""
        for name, value in self.tensors.items():
            kind, _, place = name.partition(".")
            if kind != "gradient":
                continue
            slot, buffer, part = map(int, place.split("."))
            some = ranges(Payload("gradient", Node("replica", slot), buffer, 0, shard, part=part))
            fits = 0 <= slot < arena.shape.replicas and 0 <= buffer < arena.shape.gradients
            if not fits or (value.dtype, value.shape) != (torch.float32, (some.count,)):
                raise ValueError(f"there is no place for {name}")
            rows = some.of(arena.gradient(slot, buffer))
            for there, came in zip(rows, value.split([row.numel() for row in rows])):
                there.copy_(came.view_as(there))


def read(path: Path) -> Whole:
    """The first file, which is removed."""
    tensors = read_piece(path)
    return Whole(tensors.pop("state").numpy().tobytes(), tensors)


def read_piece(path: Path) -> dict[str, Tensor]:
    """One that follows, which is removed."""
    tensors: dict[str, Tensor] = load_file(path)
    path.unlink()
    return tensors


def put_piece(store: Store, tensors: Mapping[str, Tensor], had: int) -> int:
    """Returns how many elements have come, with the first `had`. Raises anything for what is no piece that follows."""
    start = int(tensors["start"])
    stop = start + len(tensors["weights"])
    if start not in (0, had) or stop > len(store.weights):  # a shard that has died meanwhile begins anew
        raise ValueError(f"elements {start} to {stop} do not follow the first {had}")
    places = store.piece(start, stop)
    if tensors.keys() != {"start", *places}:
        raise ValueError(f"it has {sorted(tensors)}, and not {sorted(places)}")
    for name, place in places.items():
        if (place.dtype, place.shape) != (tensors[name].dtype, tensors[name].shape):
            raise ValueError(f"{name} is {tensors[name].dtype}, {tuple(tensors[name].shape)}")
        place.copy_(tensors[name])
    return stop


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
    path, size = path_of(scratch, payload.owner, payload.clock), payload.buffer
    if not 0 < size <= most:
        raise ValueError(f"no shard is of {size} bytes")
    if sends:
        with open(path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
    for older in scratch.glob(f"whole-{payload.owner}-*"):  # one is on its way at a time
        older.unlink()
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return memoryview(mmap.mmap(file.fileno(), size))
