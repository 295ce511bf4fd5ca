"""What lies in the buffers of phantoms in place of numbers: gradients that can be told apart, and folds for weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from squall.protocol.effects import Payload
from squall.protocol.messages import Factors
from squall.strategies.base import Recipe

_PRIME = (1 << 61) - 1

BatchRange = tuple[int, int, int]  # epoch, start, stop


class Gradient(NamedTuple):
    """One computation of one batch."""

    number: int
    epoch: int
    start: int
    stop: int
    basis: tuple[int, ...]  # version of each shard
    factors: Factors = ()  # that the loop behind it wants
    further: bool = False  # a further step on a batch that was stepped already

    @property
    def batch(self) -> BatchRange:
        return self.epoch, self.start, self.stop


class AppliedBuffer(NamedTuple):
    """One pushed buffer in one update of one shard."""

    gradients: tuple[Gradient, ...]
    staleness: int  # as measured: of the oldest gradient
    weight: float


class Written(NamedTuple):
    """What a shard has put into a weights buffer."""

    version: int = 0
    fold: int = 0


class File(NamedTuple):
    """A shard's part of a snapshot."""

    fold: int
    applied: tuple[AppliedBuffer, ...] = ()
    vectors: Mapping[str, tuple[float, ...]] = {}  # of Sandblaster's

    @property
    def checksum(self) -> int:
        return hash((self.fold, len(self.applied))) & 0xFFFFFFFF


def folded(fold: int, terms: Iterable[tuple[tuple[Gradient, ...], float]]) -> int:
    """The fold after one more update: another one for other gradients, weights, or another order of updates."""
    return folded_with(
        fold, tuple((*(gradient.number for gradient in gradients), weight) for gradients, weight in terms)
    )


def folded_with(fold: int, entry: tuple[object, ...]) -> int:
    """The fold after one more entry, of numbers alone: their hashes are the same in every process."""
    return (fold * 1_000_003 + hash(entry)) % _PRIME


class Memory:
    """An arena: the buffers of all slots. What a payload names has the same place in each."""

    def __init__(self, recipe: Recipe) -> None:
        slots = [(slot, buffer) for slot in range(recipe.replicas + 1) for buffer in range(2)]
        self.gradients: dict[tuple[int, int], list[Gradient]] = {key: [] for key in slots}
        self.weights = {key: [Written()] * recipe.shards for key in slots}
        self._newest: dict[tuple[str, int, int, int], tuple[int, int, int]] = {}  # at a place

    def read(self, payload: Payload) -> object:
        key = payload.slot, payload.buffer
        return tuple(self.gradients[key]) if payload.kind == "gradient" else self.weights[key][payload.shard]

    def write(self, payload: Payload, numbers: Any) -> None:
        key = payload.slot, payload.buffer
        if payload.kind == "gradient":
            self.gradients[key] = list(numbers)
        else:
            self.weights[key][payload.shard] = numbers

    def receive(self, payload: Payload, numbers: object) -> None:
        """What has travelled; a late copy comes to nothing."""
        place = ("gradient" if payload.kind == "gradient" else "weights", payload.slot, payload.buffer, payload.shard)
        newness = (payload.owner.incarnation, payload.clock, payload.version)
        if newness >= self._newest.get(place, newness):
            self._newest[place] = newness
            self.write(payload, numbers)
