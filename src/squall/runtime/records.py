"""What the records of a schedule say, and how they are put into few bytes.

A record is a flat list of entries, each a tag and what belongs to it:

    APPLIED    fingerprint, share, rate, n, n times (who, buffer, steps, weight), clock - clock of the first term;
               where loops set learning rates, the rate is a list: with a factor for each group behind it
    DELIVERED  who, buffer
    SAVED      snapshot, version
    COMPUTED   flags, count, epoch, start, length: so many batches of this length, one behind the other
    SKIPPED    flags, count, examples: of the length as before, so many examples behind those before
    CONTINUED  flags, count: the same, with none left out
    PUSHED     steps, buffer
    PREPARED   steps, buffer: of a push that was prepared by an optimizer of the replica's own
    USED       buffer
    ENDED
    CALCULATED fingerprint, calculation
    ADDED      who, buffer, steps: portions pushed, into the sum
    PART       clock, fetches taken into use before this part
    SUCCEEDED  what follows is by another process, behind whom clocks count from 0 again
    WENT_BACK  version: of the copy of its numbers from which the shard goes on
    KEPT       buffer, weight, whether it is added to what the buffer holds: the gradient computed last
    FORMED     the effect, whether some batch is known not to use all parameters
    STEPPED    steps, epoch, start, stop, examples of all members
    MOVED      what came of that: a fingerprint, or UNMOVED; GUILTY more where the member's batch is to blame

`who` is slot + replicas x incarnation, `steps` is by how much its clock is beyond its last one in this file (mostly 1,
because what repeats is compressed to little). Of a fingerprint `SEEN` is kept. A float that is 1/n for an integer n (a
share, a rate, a factor) is written as n. Flags leave out whether a gradient is added to what the buffer holds: it is,
unless it is the first behind a push.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
from torch import Tensor

from squall.protocol.effects import AddPortions, Apply, Compute, JoinGroup, Keep, Step, Term, UseWeights
from squall.protocol.nodes import Node
from squall.protocol.sandblaster.messages import Calculation
from squall.runtime import schedule
from squall.runtime.schedule import Damaged, read

WHOLE, RUN = 1024, 16  # elements of a fingerprint
SMALLEST = 2.0**-53  # float that may be written as an integer: what is tiny has an inverse that no record holds
UNMOVED, GUILTY = 128, 1
UNSEEN = 128  # in the place of a fingerprint that a process did not live to take
SEEN = 127  # bits of a fingerprint that are kept: one difference in 128 is not seen, but the next one is


class Applied(msgspec.Struct, frozen=True):
    """A shard's update, with the fingerprint of its weights after it."""

    update: Apply
    fingerprint: int


class Delivered(msgspec.Struct, frozen=True):
    """A shard's weights were written into a replica's buffer."""

    to: Node
    buffer: int


class Calculated(msgspec.Struct, frozen=True):
    """A shard's vectors were combined and multiplied; with the fingerprint of its weights after that."""

    calculation: Calculation
    fingerprint: int


class Saved(msgspec.Struct, frozen=True):
    """A shard's part of a snapshot was written."""

    number: int
    version: int


class WentBack(msgspec.Struct, frozen=True):
    """A shard's numbers are those of this version again; updates go on counting."""

    version: int


class Computed(msgspec.Struct, frozen=True):
    batch: Compute
    finite: bool
    skipped: bool = False  # by the script's loop


class Pushed(msgspec.Struct, frozen=True):
    """The gradient buffer was offered to the shards."""

    clock: int
    buffer: int
    prepared: bool  # what an optimizer of the replica's own has done was first brought into it


class NextFile(msgspec.Struct, frozen=True):
    """A replica's schedule goes on in another file; nothing is in its gradient buffer."""

    clock: int  # of its last push
    fetches: int  # taken into use


class ProcessEnded(msgspec.Struct, frozen=True):
    """The process ended in good order."""


class Formed(msgspec.Struct, frozen=True):
    """A member of all-reduce has joined a group."""

    group: JoinGroup
    unused: bool  # some batch does not use all parameters, of which torch was told


class Moved(msgspec.Struct, frozen=True):
    """A member has come to the end of the step before."""

    fingerprint: int | None  # of its weights; None: the mean was not finite, and nobody has moved
    guilty: bool = False  # it was the member's own batch


ScheduleRecord = (
    Applied | Delivered | Saved | Computed | Pushed | UseWeights | ProcessEnded | Calculated | AddPortions | Keep
    | NextFile | Formed | Step | Moved | WentBack
)  # fmt: skip


class Fingerprint:
    """A checksum of some weights: others after every update, all in turn.

    A shard of up to `WHOLE` elements is looked at in whole; of a larger one it is a run out of each quarter. Single
    elements from all over would tell more at once, but an update has just swept the caches: 64 of them took 35 µs.
    """

    def __init__(self, weights: Tensor, updates: int = 0) -> None:
        elements, size = weights.numel(), weights.element_size()
        quarter = elements // 4
        starts, run = ([0], elements) if elements <= WHOLE else ([0, quarter, 2 * quarter, 3 * quarter], RUN)
        self._bytes = weights.numpy().data.cast("B")
        self._starts, self._run = [start * size for start in starts], run * size
        self._last = len(self._bytes) - self._starts[-1] - self._run  # where behind its start the last run begins
        self._places = 1 + -(-self._last // self._run)
        self.updates = updates

    def __call__(self) -> int:
        """Of the weights after the next update."""
        place = self.updates * 2654435761 % self._places  # a prime: every place in turn
        first = min(place * self._run, self._last)
        self.updates += 1
        check = 0
        for start in self._starts:
            check = crc32(self._bytes[start + first : start + first + self._run], check)
        return check


def short(value: float) -> float:
    """A float as it is written: n for 1/n."""
    if value == 1.0:
        return 1
    whole = round(1 / value) if value >= SMALLEST else 0
    return whole if whole and 1 / whole == value else value


def moved(fingerprint: int, finite: bool, guilty: bool) -> int:
    """What came of a step, as it is written."""
    return fingerprint if finite else UNMOVED + GUILTY * guilty


def _long(value: float) -> float:
    return 1 / value if isinstance(value, int) else value


_MISTAKES = (ValueError, TypeError, StopIteration, RuntimeError, ArithmeticError, msgspec.MsgspecError)


def records(path: Path, replicas: int, examples: float = math.inf) -> Iterator[ScheduleRecord]:
    """What a file says, in order. Raises `Damaged` behind the last good record.

    `examples` is how many an epoch has: a record of batches beyond them is damage, and not a loop for hours.
    """
    batches, clocks = _Batches(examples), ClockSteps()
    for number, raw in enumerate(read(path)):
        entries = iter(raw)
        try:
            for tag in entries:
                if tag in (schedule.COMPUTED, schedule.SKIPPED, schedule.CONTINUED):
                    yield from batches.next(tag, entries)
                    continue
                if tag == schedule.SUCCEEDED:
                    clocks = ClockSteps()
                    continue
                record = _record(tag, entries, replicas, clocks)
                if isinstance(record, Pushed):
                    batches.held = 0
                yield record
        except _MISTAKES as error:
            raise Damaged(f"{path} is damaged at record {number}: {raw!r} says nothing") from error


def _record(tag: int, entries: Iterator[Any], replicas: int, clocks: ClockSteps) -> ScheduleRecord:
    """One that is no batch, taken from the entries behind its tag."""
    if tag == schedule.APPLIED:
        return _applied(entries, replicas, clocks)
    if tag == schedule.DELIVERED:
        return Delivered(_node(next(entries), replicas), next(entries))
    if tag == schedule.SAVED:
        return Saved(next(entries), next(entries))
    if tag in (schedule.PUSHED, schedule.PREPARED):
        return Pushed(clocks.clock(0, next(entries)), next(entries), tag == schedule.PREPARED)
    if tag == schedule.WENT_BACK:
        return WentBack(next(entries))
    if tag == schedule.USED:
        return UseWeights(next(entries))
    if tag == schedule.ENDED:
        return ProcessEnded()
    if tag == schedule.PART:
        return NextFile(clocks.clock(0, next(entries)), next(entries))
    if tag == schedule.CALCULATED:
        fingerprint, calculation = islice(entries, 2)
        return Calculated(msgspec.convert(calculation, Calculation), fingerprint)
    if tag == schedule.ADDED:
        who, buffer, steps = islice(entries, 3)
        return AddPortions(_node(who, replicas), buffer, clocks.clock(who, steps))
    if tag == schedule.KEPT:
        return Keep(next(entries), _long(next(entries)), next(entries))
    if tag == schedule.FORMED:
        return Formed(msgspec.convert(next(entries), JoinGroup), next(entries))
    if tag == schedule.STEPPED:
        return Step(clocks.clock(0, next(entries)), *islice(entries, 4))
    if tag == schedule.MOVED:
        found = next(entries)
        return Moved(found) if found < UNMOVED else Moved(None, found == UNMOVED + GUILTY)
    raise ValueError(f"unknown tag {tag}")


def _applied(entries: Iterator[Any], replicas: int, clocks: ClockSteps) -> Applied:
    fingerprint, share, rate, count = islice(entries, 4)
    if count < 1:
        raise ValueError(f"an update of {count} terms")
    terms = []
    for _ in range(count):
        who, buffer, steps, weight = islice(entries, 4)
        terms.append(Term(_node(who, replicas), buffer, _long(weight), clocks.clock(who, steps)))
    clock = terms[0].clock + next(entries)
    rate, *factors = rate if isinstance(rate, list) else [rate]
    scaled = tuple(None if factor is None else _long(factor) for factor in factors)
    return Applied(Apply(tuple(terms), _long(share), clock, _long(rate), scaled), fingerprint)


def _node(who: int, replicas: int) -> Node:
    incarnation, slot = divmod(who, replicas)
    return Node("replica", slot, incarnation)


class ClockSteps:
    """Clocks as steps from one to the next of the same replica, and back."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def steps(self, who: int, clock: int) -> int:
        steps = clock - self._last.get(who, 0)
        self._last[who] = clock
        return steps

    def clock(self, who: int, steps: int) -> int:
        clock = self._last[who] = self._last.get(who, 0) + steps
        return clock


class _Batches:
    """Where the last batch of a file ended, and what the gradient buffer holds."""

    def __init__(self, examples: float) -> None:
        self._examples = examples
        self._epoch = self._at = self._length = 0
        self.held = 0  # batches since the last push

    def next(self, tag: int, entries: Iterator[Any]) -> Iterator[Computed]:
        bits, count = islice(entries, 2)
        if tag == schedule.COMPUTED:
            self._epoch, self._at, self._length = islice(entries, 3)
        elif tag == schedule.SKIPPED:
            self._at += next(entries)
        if count < 1 or self._length < 1 or self._at < 0 or self._at + count * self._length > self._examples:
            raise ValueError(f"{count} batches of {self._length} examples from {self._at}")
        buffer, finite, skipped = (bits >> 2 & 3) - 1, bool(bits & 1), bool(bits >> 4)
        for _ in range(count):
            start, self._at = self._at, self._at + self._length
            accumulate = self.held > 0 and buffer >= 0
            self.held += finite
            yield Computed(Compute(self._epoch, start, self._at, buffer, accumulate, bool(bits & 2)), finite, skipped)
