"""The weights of a run's best evaluation: one safetensors file, written whole or not at all, in the run's directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from squall.errors import SnapshotMismatch
from squall.protocol.effects import KeepWeights
from squall.protocol.events import WeightsKept
from squall.runtime.snapshot import sync
from squall.vector import Layout

NAME = "best.safetensors"


@dataclass(frozen=True)
class BestWeights:
    """What was evaluated, and with which result. `weights` are as the file has them: they may be damaged."""

    metric: str
    value: float
    updates: int
    examples: int
    layout: Layout
    weights: Tensor
    checksum: str  # that they had


def keep(directory: Path, effect: KeepWeights, weights: Tensor, layout: Layout) -> WeightsKept:
    """Write the weights to the disk instead of those kept before. If that fails, the event says why."""
    path, beside = directory / NAME, directory / f"{NAME}.new"
    about = {
        "metric": effect.metric, "value": repr(effect.value), "updates": str(effect.updates),
        "examples": str(effect.examples), "layout": msgspec.json.encode(layout).decode(),
        "checksum": _checksum(weights),
    }  # fmt: skip
    try:
        save_file({"weights": weights}, beside, metadata=about)
        os.chmod(beside, 0o600)
        sync(beside)
        beside.replace(path)
        sync(directory)
    except Exception as error:  # safetensors has an error type of its own for a full disk
        beside.unlink(missing_ok=True)
        return WeightsKept(f"{type(error).__name__}: {error}")
    return WeightsKept()


def kept(directory: Path) -> BestWeights | None:
    """None where nothing is. Raises `SnapshotMismatch` for a file that cannot be read."""
    path = directory / NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about, vector = file.metadata(), file.get_tensor("weights")
        layout, value = msgspec.json.decode(about["layout"], type=Layout), float(about["value"])
        updates, examples = int(about["updates"]), int(about["examples"])
        return BestWeights(about["metric"], value, updates, examples, layout, vector, about["checksum"])
    except (OSError, SafetensorError, KeyError, ValueError, msgspec.DecodeError) as error:
        raise SnapshotMismatch(f"{path} cannot be read ({error}): remove it") from error


def weights(directory: Path, layout: Layout) -> Tensor | None:
    """The vector, for a model of this layout; None where nothing is kept. Raises `SnapshotMismatch`."""
    found = kept(directory)
    if found is None:
        return None
    if differences := layout.differences(found.layout):
        raise SnapshotMismatch("\n  ".join([f"{directory / NAME} belongs to another model:", *differences[:20]]))
    if _checksum(found.weights) != found.checksum:
        raise SnapshotMismatch(f"{directory / NAME} is damaged: its checksum is another: remove it")
    return found.weights


def _checksum(vector: Tensor) -> str:
    return str(crc32(vector.contiguous().numpy().tobytes()))
