"""What lies in the buffers of phantoms in place of numbers: gradients that can be told apart, and folds for weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from squall.protocol.effects import Payload
from squall.protocol.messages import Factors
from squall.protocol.nodes import Node
from squall.strategies.base import Recipe

_PRIME = (1 << 61) - 1

Place = tuple[str, int, int, int, int]  # of a payload
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
        self.weights = {key: [Written()] * (recipe.shards or 1) for key in slots}
        self.parcels: dict[Place, Any] = {}  # what other parts of replicas have, who lie apart
        self.pieces: dict[int, tuple[int, int, File]] = {}  # by shard: snapshot, number of the piece, the whole file
        self.wholes: dict[tuple[Node, int], Any] = {}  # by backup and number: parts of all that its shard was
        self.in_use: dict[int, tuple[int, float]] = {}  # slot -> weights buffer that is computed on, until when
        self._newest: dict[Place, tuple[int, int, int]] = {}
        self._torn: dict[Place, None] = {}  # where half of a payload lies

    def read(self, payload: Payload) -> object:
        if payload.part > 0:
            return self.parcels.get(_place(payload))
        if payload.kind == "copy":
            return self.wholes.get((payload.owner, payload.clock))
        return self.pieces[payload.shard] if payload.kind == "piece" else self._read(payload)

    def put(self, payload: Payload, numbers: Any) -> None:
        """By a process of this machine: over whatever lies there, half of something too."""
        self._torn.pop(_place(payload), None)
        self.write(payload, numbers)

    def write(self, payload: Payload, numbers: Any) -> None:
        if payload.part > 0:
            self.parcels[_place(payload)] = numbers
        elif payload.kind == "piece":
            self.pieces[payload.shard] = numbers
        else:
            self._write(payload, numbers)

    def _read(self, payload: Payload) -> object:
        if payload.kind == "gradient":
            return self._pushed(payload.slot, payload.buffer)
        return self.weights[payload.slot, payload.buffer][payload.shard]

    def _pushed(self, slot: int, buffer: int) -> tuple[Any, ...]:
        return tuple(self.gradients[slot, buffer])

    def _write(self, payload: Payload, numbers: Any) -> None:
        key = payload.slot, payload.buffer
        if payload.kind == "gradient":
            self.gradients[key] = list(numbers)
        else:
            self.weights[key][payload.shard] = numbers

    def new_process(self, slot: int) -> None:
        """Whoever had the slot is gone."""
        self.in_use.pop(slot, None)
        for place in [place for place in self._torn if place[1] == slot]:
            del self._torn[place]

    def clear(self, slot: int, buffer: int) -> None:
        """A gradient begins anew, over whatever lies there: half of one, too, of who had the slot before."""
        self.gradients[slot, buffer] = []
        for place in [place for place in self._torn if place[:3] == ("gradient", slot, buffer) and place[4] == 0]:
            del self._torn[place]

    def check_free(self, payload: Payload, now: float) -> None:
        """Nobody may compute on weights that are about to be written."""
        if payload.kind in ("gradient", "piece", "copy"):
            return
        used, until = self.in_use.get(payload.slot, (-1, 0.0))
        assert used != payload.buffer or now >= until, f"slot {payload.slot}: weights written while in use"

    def torn(self, kind: str, slot: int, buffer: int, shard: int, part: int = 0) -> bool:
        """Half of a payload is there: a gradient's of this shard's range, or a piece's."""
        return (kind, slot, buffer, shard, part) in self._torn

    def gradient(self, slot: int, buffer: int, shard: int, others: Iterable[int] = ()) -> tuple[Any, ...]:
        """What a shard finds in its range of a gradient buffer; `others` are parts that have brought their own of it.

        Where they have brought something else than the first part, that.
        """
        found: tuple[Any, ...] = () if self.torn("gradient", slot, buffer, shard) else self._pushed(slot, buffer)
        for part in others:
            place = "gradient", slot, buffer, shard, part
            brought = () if place in self._torn else self.parcels.get(place, ())
            if brought != found:
                return tuple(brought)
        return found

    def receive(self, payload: Payload, numbers: object) -> None:
        """What has travelled; a late copy comes to nothing."""
        if payload.kind == "copy":
            self.wholes[payload.owner, payload.clock] = numbers
            return
        place, newness = _place(payload), _newness(payload)
        if newness >= self._newest.get(place, newness):
            self._newest[place] = newness
            self.put(payload, numbers)

    def tear(self, payload: Payload, numbers: object) -> bool:
        """A connection breaks within a payload: half of the numbers are at their place. A copy is not taken at all."""
        place = _place(payload)
        if payload.kind == "copy":
            return False
        if place in self._newest and _newness(payload) <= self._newest[place]:
            return False
        self._torn[place] = None
        if payload.kind not in ("gradient", "piece"):
            self.spoil(payload, numbers)
        return True

    def spoil(self, payload: Payload, numbers: Any) -> None:
        """Put something in the place of weights that are neither these nor others."""
        self.write(payload, Written(-1, numbers.fold))


def _place(payload: Payload) -> Place:
    if payload.kind == "piece":
        return "piece", payload.slot, 0, payload.shard, 0
    kind, part = "gradient" if payload.kind == "gradient" else "weights", max(0, payload.part)
    return kind, payload.slot, payload.buffer, payload.shard, part


def _newness(payload: Payload) -> tuple[int, int, int]:
    if payload.kind == "piece":  # each snapshot's are counted anew
        return 0, payload.version, payload.clock
    return payload.owner.incarnation, payload.clock, payload.version
