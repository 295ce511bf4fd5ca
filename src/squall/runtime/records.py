"""What the records of a schedule say, and how they are put into few bytes.

    APPLIED    fingerprint, share, rate, clock - clock of the first term, then per term: who, buffer, clock, weight
    DELIVERED  who, buffer
    SAVED      snapshot, version
    COMPUTED   flags, epoch, start, length, count: so many batches of this length, one behind the other
    CONTINUED  flags, count: of the length as before, beginning where those before ended
    PUSHED     clock, buffer, 1 if what is pushed was prepared first
    USED       buffer

`who` is slot + replicas x incarnation. A float that is 1/n for an integer n (a share, a rate) is written as n.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from squall.protocol.core import Apply, Compute, Node, Term
from squall.runtime.schedule import (
    APPLIED,
    COMPUTED,
    CONTINUED,
    DELIVERED,
    ENDED,
    PUSHED,
    SAVED,
    USED,
    Damaged,
    read,
)

SAMPLED = 64  # elements of a fingerprint


class Applied(msgspec.Struct, frozen=True):
    """A shard's update, and the fingerprint of its weights behind it."""

    update: Apply
    fingerprint: int


class Delivered(msgspec.Struct, frozen=True):
    """A shard's weights were written into a replica's buffer."""

    to: Node
    buffer: int


class Saved(msgspec.Struct, frozen=True):
    """A shard's part of a snapshot was written."""

    number: int
    version: int


class Computed(msgspec.Struct, frozen=True):
    batch: Compute
    finite: bool


class Pushed(msgspec.Struct, frozen=True):
    """The gradient buffer was offered to the shards."""

    clock: int
    buffer: int
    prepared: bool  # what an optimizer of the replica's own has done was first brought into it


class Used(msgspec.Struct, frozen=True):
    """All shards had written this weights buffer, and the replica took it into use."""

    buffer: int


class Ended(msgspec.Struct, frozen=True):
    """The process ended in good order."""


Record = Applied | Delivered | Saved | Computed | Pushed | Used | Ended


class Fingerprint:
    """The exclusive or of the bits of some weights: others after every update, spread over the whole range."""

    def __init__(self, weights: Tensor) -> None:
        self._bits = weights.numpy().view(np.uint32)
        self._stride = -(-len(self._bits) // SAMPLED)
        self._updates = 0

    def __call__(self) -> int:
        """Of the weights after the next update."""
        first = self._updates * 2654435761 % self._stride  # a multiplier that visits every place before it repeats one
        self._updates += 1
        return int(np.bitwise_xor.reduce(self._bits[first :: self._stride]))


def short(value: float) -> float:
    """As it is written."""
    if value == 1.0:
        return 1
    whole = round(1 / value) if value > 0 else 0
    return whole if whole and 1 / whole == value else value


def _long(value: float) -> float:
    return 1 / value if isinstance(value, int) else value


def flags(batch: Compute, finite: bool) -> int:
    return finite | batch.accumulate << 1 | batch.local_step << 2 | (batch.buffer + 1) << 3


def records(path: Path, replicas: int) -> Iterator[Record]:
    """What a file says, in order. Raises `Damaged` behind the last good record."""
    batches = _Batches()
    for number, raw in enumerate(read(path)):
        try:
            tag, *rest = raw
            if tag in (COMPUTED, CONTINUED):
                yield from batches.of(tag == CONTINUED, rest)
            else:
                yield _record(tag, rest, replicas)
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            raise Damaged(f"{path} is damaged at record {number}: {raw!r} says nothing") from error


def _record(tag: int, rest: list[Any], replicas: int) -> Record:
    if tag == APPLIED and len(rest) >= 8 and len(rest) % 4 == 0:
        return _applied(rest, replicas)
    if tag == DELIVERED:
        who, buffer = rest
        return Delivered(_node(who, replicas), buffer)
    if tag == SAVED:
        number, version = rest
        return Saved(number, version)
    if tag == PUSHED:
        clock, buffer, *prepared = rest
        return Pushed(clock, buffer, bool(prepared))
    if tag == USED:
        (buffer,) = rest
        return Used(buffer)
    if tag == ENDED:
        return Ended()
    raise ValueError(f"unknown tag {tag}")


def _applied(rest: list[Any], replicas: int) -> Applied:
    fingerprint, share, rate, later, *flat = rest
    terms = []
    for at in range(0, len(flat), 4):
        who, buffer, clock, weight = flat[at : at + 4]
        terms.append(Term(_node(who, replicas), buffer, _long(weight), clock))
    return Applied(Apply(tuple(terms), _long(share), terms[0].clock + later, _long(rate)), fingerprint)


def _node(who: int, replicas: int) -> Node:
    incarnation, slot = divmod(who, replicas)
    return Node("replica", slot, incarnation)


class _Batches:
    """Where the last batch of a file ended."""

    def __init__(self) -> None:
        self._epoch = self._at = self._length = 0

    def of(self, continued: bool, rest: list[Any]) -> Iterator[Computed]:
        if continued:
            bits, count = rest
        else:
            bits, self._epoch, self._at, self._length, count = rest
        for _ in range(count):
            start, self._at = self._at, self._at + self._length
            batch = Compute(self._epoch, start, self._at, (bits >> 3) - 1, bool(bits & 2), bool(bits & 4))
            yield Computed(batch, bool(bits & 1))
