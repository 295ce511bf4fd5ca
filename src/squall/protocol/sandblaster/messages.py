"""Messages of Sandblaster, between coordinator, shards and replicas."""

from __future__ import annotations

from squall.protocol.messages import Count, OrNone, Struct


class Combine(Struct, frozen=True, array_like=True, gc=False):
    """target = the sum of coefficient x vector over the terms, of which there is at least one."""

    target: str
    terms: tuple[tuple[str, float], ...]


class Calculation(Struct, frozen=True, tag="vectors", array_like=True, gc=False):
    """Combine vectors, then form the dot products of all rows with all columns, and the largest magnitudes.

    `opens`: after combining, set `sum` to zero and take pushed portions of this evaluation from now on, of no other.
    The method says what to calculate; the coordinator puts in `number`, `opens`, `examples` and `portions`.
    """

    number: Count = 0
    combine: tuple[Combine, ...] = ()
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    largest: tuple[str, ...] = ()
    opens: Count | None = None
    examples: Count = 0  # evaluated so far
    portions: Count = 0  # of the evaluation that it opens


class Calculated(Struct, frozen=True, tag="vectors!", array_like=True, gc=False):
    """Of this shard's range: the dot products, row by row, and the largest magnitudes."""

    number: Count
    values: tuple[float, ...]


class PortionRequest(Struct, frozen=True, tag="portion?", array_like=True, gc=False):
    """Ask for a portion, and tell of the one just computed (none: -1): its loss, a mean over its examples."""

    evaluation: Count = 0
    done: OrNone = -1
    loss: float = 0.0
    finite: bool = True


class Portion(Struct, frozen=True, tag="portion", array_like=True, gc=False):
    """What to do with the portion just computed, and what to do next.

    `keep`: add its gradient to what will be pushed (else somebody was faster). `push`: push that, before or while the
    next portion is computed. `number` -1: there is none for now; another Portion follows when there is.
    """

    evaluation: Count
    keep: bool
    push: bool
    number: int = -1
    epoch: Count = 0
    start: Count = 0
    stop: Count = 0
    weight: float = 0.0  # share of the batch


class PushPortions(Struct, frozen=True, tag="portions", array_like=True, gc=False):
    """The weighted sum of these portions' gradients lies in the sender's gradient buffer."""

    evaluation: Count
    buffer: Count
    portions: tuple[Count, ...]
    clock: Count  # pushes of the sender, with this one


class PortionsTaken(Struct, frozen=True, tag="portions!", array_like=True, gc=False):
    """From a shard: these are in its sum. The replica's buffer is free again."""

    evaluation: Count
    portions: tuple[Count, ...]


Message = Calculation | Calculated | PortionRequest | Portion | PushPortions | PortionsTaken
