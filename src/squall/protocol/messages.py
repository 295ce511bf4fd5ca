"""The messages of the loop, and those that all kinds of work share, as typed msgspec structs.

Messages hold no numbers of the model: a push and a fetch are doorbells for buffers whose payload lies in shared memory,
or travels beside the frame.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

# Bounded, so that sums and products of what is told can be recorded, whoever tells it.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
OrNone = Annotated[int, msgspec.Meta(ge=-1, le=1 << 31)]  # -1: none
Few = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]  # in a push, or a report
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Address = Annotated[str, msgspec.Meta(max_length=300)]  # of who is called; what it means the hosts know


class Struct(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message, or a part of one."""


Factors = tuple[float | None, ...]  # of each param group's learning rate; None: it takes no part. Empty: all are 1


class Cover(Struct, frozen=True, array_like=True, gc=False):
    """Examples up to `upto` of this lease are in what is pushed or reported."""

    lease: Count
    upto: Count


class Lease(Struct, frozen=True, array_like=True, gc=False):
    """The right to train on examples [start, stop) of an epoch's order, a multiple of the batch size long."""

    id: Count
    epoch: Count
    start: Count
    stop: Count


# Beside the loss: name -> sum over batches of value x examples, and examples.
Extras = dict[str, tuple[float, Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]]]

Inside = Annotated[tuple[Annotated[float, msgspec.Meta(ge=0, le=1e15)], ...], msgspec.Meta(max_length=1 << 12)]


class Stats(Struct, frozen=True, array_like=True, gc=False):
    """What a replica did since its last report."""

    examples: Count = 0
    batches: Few = 0
    loss_sum: float = 0.0  # sum over batches of mean loss x examples
    compute_s: Seconds = 0.0
    wait_s: Seconds = 0.0
    exchanges: Few = 0
    pushes: Few = 0
    fetches: Few = 0
    staleness: dict[Count, Few] = {}  # staleness -> pushes applied with it, over all shards
    extras: Extras = {}
    inside: Inside = ()  # what the replica's host has measured since it began: for the record, in the host's order
    clock: Count = 0  # at which the replica is


# ---------------------------------------------------------------- replica <-> coordinator


class Join(Struct, frozen=True, tag="join", array_like=True, gc=False):
    """A replica or the evaluator is ready. `pid` is for people who read the record.

    `address` is where other replicas, or its other parts, call it if they do.
    """

    pid: OrNone
    address: Address = ""


class Welcome(Struct, frozen=True, tag="welcome", array_like=True, gc=False):
    """The replica is a member. Its clock starts here, or where the shards say in answer to its first fetch."""

    clock: Count


class LeaseRequest(Struct, frozen=True, tag="lease?", array_like=True, gc=False):
    """Ask for the next work."""

    step_s: Seconds = 0.0  # mean duration of a batch since the last request; 0: there was none


class Grant(Struct, frozen=True, tag="lease", array_like=True, gc=False):
    """Work, in the order in which it was asked for; where there are rounds, of the next one.

    Without a lease, where others wait for the next exchange: take part in it with nothing to push. Elsewhere: there is
    nothing for now, and another grant follows when there is.
    """

    lease: Lease | None
    steps: Few = 0  # batches of a push from now on, where that depends on the replica's speed; 0: no change


class Progress(Struct, frozen=True, tag="progress", array_like=True, gc=False):
    """Everything in `covers` has been applied by all shards."""

    covers: tuple[Cover, ...]
    stats: Stats


class Dropped(Struct, frozen=True, tag="dropped", array_like=True, gc=False):
    """A push came too late for its round: what this lease has left is to be dealt again."""

    lease: Count


class Weights(Struct, frozen=True, array_like=True, gc=False):
    """Which weights were measured: what is in them, counted by the shard that has applied least, and their age."""

    updates: Count
    examples: Count
    age_s: Seconds  # since they were fetched, or moved by the replica itself


class Logged(Struct, frozen=True, tag="logged", array_like=True, gc=False):
    """A user's own numbers, for the record, and the weights that the replica has."""

    values: dict[str, float]
    weights: Weights


class Skip(Struct, frozen=True, tag="skip", array_like=True, gc=False):
    """The script's loop leaves these examples of a lease out. They will be covered as if they were trained.

    The replica waits for `SkipNoted`, so that what a cover tells others than the coordinator is never more than this.
    """

    lease: Count
    epoch: Count
    start: Count
    stop: Count


class SkipNoted(Struct, frozen=True, tag="skip!", array_like=True, gc=False):
    """What was left out is in the record."""


class NonFinite(Struct, frozen=True, tag="nonfinite", array_like=True, gc=False):
    """A batch gave a loss or gradient with NaN or Inf; `final`: its retry did too, and waits for `SkipNoted` or `Stop`.
    `spoilt`: leaving it out would mend nothing: the weights are not finite either, or have come through a step on it.
    """

    epoch: Count
    start: Count
    stop: Count
    lease: Count
    final: bool
    spoilt: bool = False


class Stop(Struct, frozen=True, tag="stop", array_like=True, gc=False):
    """Finish the exchange under way and leave (replica), or end (shard, evaluator, nursery)."""


class Left(Struct, frozen=True, tag="left", array_like=True, gc=False):
    """The replica has nothing under way and ends."""

    covers: tuple[Cover, ...]
    stats: Stats


# ---------------------------------------------------------------- replica or evaluator <-> shard


class Exchange(Struct, frozen=True, tag="exchange", array_like=True, gc=False):
    """A push and/or a fetch. `gradient` and `weights` are buffer numbers in the sender's slot, -1 for none."""

    clock: Count
    gradient: OrNone = -1
    weights: OrNone = -1
    basis: Count = 0  # version that the pushed gradient was computed on
    examples: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0  # behind the pushed gradient
    covers: tuple[Cover, ...] = ()
    batches: Few = 0  # behind the pushed gradient
    factors: Factors = ()  # that the script's loop wants


class Exchanged(Struct, frozen=True, tag="exchanged", array_like=True, gc=False):
    """The push was applied and the fetched weights are in the sender's buffer. `clock` is the sender's."""

    clock: Count
    version: Count
    staleness: Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)] = -1  # of the push; -1 where there was none
    dropped: bool = False  # the push came too late for its round, and was not applied
    examples: Count = 0  # behind that version


class Parcel(Struct, frozen=True, tag="parcel", array_like=True, gc=False):
    """What a part of a replica on several machines has of its exchange: of a push's gradient, or of fetched weights."""

    clock: Count
    buffer: Count


# ---------------------------------------------------------------- coordinator <-> shard


class Member(Struct, frozen=True, array_like=True, gc=False):
    """A replica in a view; its clock counts from `entry`, or from the slowest replica's where that is more."""

    slot: Count
    incarnation: Count
    entry: Count


class View(Struct, frozen=True, tag="view", array_like=True, gc=False):
    """The live replicas, in slot order. Who was in an older view and is not in this one is gone for good."""

    number: Count
    members: tuple[Member, ...]


class Departed(Struct, frozen=True, array_like=True, gc=False):
    """What a shard had applied of a replica that left a view."""

    slot: Count
    incarnation: Count
    applied: dict[Count, Count]  # lease -> upto; for Sandblaster portion -> evaluation


class ViewSeen(Struct, frozen=True, tag="view!", array_like=True, gc=False):
    """From now on nothing of the departed replicas is applied: their slots can be used again.

    A replica, where there are no shards, has left its group and forgotten what it was given; it has finished `clock`.
    """

    number: Count
    departed: tuple[Departed, ...] = ()
    clock: Count = 0


class TakeSnapshot(Struct, frozen=True, tag="snapshot", array_like=True, gc=False):
    number: Count


class SnapshotTaken(Struct, frozen=True, tag="snapshot!", array_like=True, gc=False):
    """This shard's part is on disk; `progress` says what of the live leases is in it."""

    number: Count
    version: Count
    progress: tuple[Cover, ...]
    error: str = ""
    checksum: Count = 0
    examples: Count = 0  # behind that version


PIECE_BYTES = 1 << 20  # of a shard's file; other messages wait for no longer than one takes


class SnapshotPiece(Struct, frozen=True, tag="piece", array_like=True, gc=False):
    """Bytes [start, start + size) of `total` of a file that the shard has on another machine travel along."""

    number: Count
    start: Count
    size: Annotated[int, msgspec.Meta(ge=1, le=PIECE_BYTES)]
    total: Count


class PieceKept(Struct, frozen=True, tag="piece!", array_like=True, gc=False):
    """It is in its place, or there was an error; the next may come."""

    number: Count  # of the snapshot, or the lease
    error: str = ""


# ---------------------------------------------------------------- coordinator <-> evaluator


class Evaluate(Struct, frozen=True, tag="evaluate", array_like=True, gc=False):
    """Weights that turn out better than `best` are kept, where that was asked for.

    `weights` lie in the evaluator's buffer already, where there are no shards to fetch any from.
    """

    number: Count
    best: float | None = None
    weights: Weights | None = None


class Evaluated(Struct, frozen=True, tag="evaluate!", array_like=True, gc=False):
    number: Count
    weights: Weights
    values: dict[str, float]
    error: str = ""  # why the weights could not be kept


Message = (
    Join | Welcome | LeaseRequest | Grant | Progress | Dropped | Logged | NonFinite | Stop | Left | Skip | SkipNoted
    | Exchange | Exchanged | Parcel | View | ViewSeen | TakeSnapshot | SnapshotTaken | SnapshotPiece | PieceKept
    | Evaluate | Evaluated
)  # fmt: skip
