"""Every message that crosses a link, as typed msgspec structs, and the frame that carries them.

Messages hold no numbers of the model: a push and a fetch are doorbells for buffers whose payload travels by
shared memory or in frames of its own. Decoding is strict; a frame that is malformed or too large raises, and
nothing is ever unpickled.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_FRAME_BYTES = 4 * 1024 * 1024  # a view of 50,000 members fits; anything larger is not ours

Count = Annotated[int, msgspec.Meta(ge=0)]


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


Factors = tuple[float | None, ...]  # of each param group's learning rate; None: it takes no part. Empty: all are 1


class Cover(_Message, frozen=True, array_like=True, gc=False):
    """Examples up to `upto` of this lease are in what is pushed or reported."""

    lease: int
    upto: Count


def covered(known: tuple[Cover, ...], more: tuple[Cover, ...]) -> tuple[Cover, ...]:
    """Both, the oldest lease first. A replica goes from lease to lease, and does not come back to one."""
    if known and more and known[-1].lease == more[0].lease:
        return known[:-1] + more
    return known + more


class Lease(_Message, frozen=True, array_like=True, gc=False):
    """The right to train on examples [start, stop) of an epoch's order, a multiple of the batch size long."""

    id: Count
    epoch: Count
    start: Count
    stop: Count


Extras = dict[str, tuple[float, int]]  # beside the loss: name -> sum over batches of value x examples, and examples


class Stats(_Message, frozen=True, array_like=True, gc=False):
    """What a replica did since its last report."""

    examples: Count = 0
    batches: Count = 0
    loss_sum: float = 0.0  # sum over batches of mean loss x examples
    compute_s: float = 0.0
    wait_s: float = 0.0
    exchanges: Count = 0
    pushes: Count = 0
    fetches: Count = 0
    staleness: dict[int, int] = {}  # staleness -> pushes applied with it, over all shards
    extras: Extras = {}


# ---------------------------------------------------------------- replica <-> coordinator


class Join(_Message, frozen=True, tag="join", array_like=True, gc=False):
    """A replica or the evaluator is ready. `pid` is for people who read the record."""

    pid: int


class Welcome(_Message, frozen=True, tag="welcome", array_like=True, gc=False):
    """The slot is the replica's; its clock starts here, or where the shards say in answer to its first fetch."""

    clock: Count


class LeaseRequest(_Message, frozen=True, tag="lease?", array_like=True, gc=False):
    """Ask for work. `clock` is the exchange that the work is for."""

    clock: Count
    step_s: float = 0.0  # mean duration of a batch since the last request; 0: there was none


class Grant(_Message, frozen=True, tag="lease", array_like=True, gc=False):
    """Work for the exchange `clock`.

    Without a lease, where others wait for that exchange: take part in it with nothing to push. Elsewhere: there is
    nothing for now, and another grant follows when there is.
    """

    clock: Count
    lease: Lease | None
    steps: Count = 0  # batches of a push from now on, where that depends on the replica's speed; 0: no change


class Progress(_Message, frozen=True, tag="progress", array_like=True, gc=False):
    """Everything in `covers` has been applied by all shards."""

    covers: tuple[Cover, ...]
    stats: Stats


class Dropped(_Message, frozen=True, tag="dropped", array_like=True, gc=False):
    """A push came too late for its round: what this lease has left is to be dealt again."""

    lease: Count


class Weights(_Message, frozen=True, array_like=True, gc=False):
    """Which weights were measured: what is in them, counted by the shard that has applied least, and their age."""

    updates: Count
    examples: Count
    age_s: float  # since they were fetched, or moved by the replica itself


class Logged(_Message, frozen=True, tag="logged", array_like=True, gc=False):
    """A user's own numbers, for the record, and the weights that the replica has."""

    values: dict[str, float]
    weights: Weights


class Skip(_Message, frozen=True, tag="skip", array_like=True, gc=False):
    """The script's loop leaves these examples of a lease out. They will be covered as if they were trained.

    The replica waits for `SkipNoted`, so that what a cover tells others than the coordinator is never more than this.
    """

    lease: Count
    epoch: Count
    start: Count
    stop: Count


class SkipNoted(_Message, frozen=True, tag="skip!", array_like=True, gc=False):
    """What was left out is in the record."""


class NonFinite(_Message, frozen=True, tag="nonfinite", array_like=True, gc=False):
    """A batch gave a loss or gradient with NaN or Inf; `final` after its retry did too."""

    epoch: Count
    start: Count
    stop: Count
    lease: Count
    final: bool


class Stop(_Message, frozen=True, tag="stop", array_like=True, gc=False):
    """Finish the exchange under way and leave (replica), or end (shard, evaluator)."""


class Left(_Message, frozen=True, tag="left", array_like=True, gc=False):
    """The replica has nothing under way and ends."""

    covers: tuple[Cover, ...]
    stats: Stats


# ---------------------------------------------------------------- replica or evaluator <-> shard


class Exchange(_Message, frozen=True, tag="exchange", array_like=True, gc=False):
    """A push and/or a fetch. `gradient` and `weights` are buffer numbers in the sender's slot, -1 for none."""

    clock: Count
    gradient: int = -1
    weights: int = -1
    basis: Count = 0  # version that the pushed gradient was computed on
    examples: Count = 0  # behind the pushed gradient
    covers: tuple[Cover, ...] = ()
    batches: Count = 0  # behind the pushed gradient
    factors: Factors = ()  # that the script's loop wants


class Exchanged(_Message, frozen=True, tag="exchanged", array_like=True, gc=False):
    """The push was applied and the fetched weights are in the sender's buffer. `clock` is the sender's."""

    clock: Count
    version: Count
    staleness: int = -1  # of the push; -1 where there was none
    dropped: bool = False  # the push came too late for its round, and was not applied
    examples: Count = 0  # behind that version


# ---------------------------------------------------------------- coordinator <-> shard


class Member(_Message, frozen=True, array_like=True, gc=False):
    """A replica in a view; its clock counts from `entry`, or from the slowest replica's where that is more."""

    slot: Count
    incarnation: Count
    entry: Count


class View(_Message, frozen=True, tag="view", array_like=True, gc=False):
    """The live replicas, in slot order. Who was in an older view and is not in this one is gone for good."""

    number: Count
    members: tuple[Member, ...]


class Departed(_Message, frozen=True, array_like=True, gc=False):
    """What a shard had applied of a replica that left a view."""

    slot: Count
    incarnation: Count
    covers: tuple[Cover, ...]


class ViewSeen(_Message, frozen=True, tag="view!", array_like=True, gc=False):
    """From now on nothing of the departed replicas is applied: their slots can be used again."""

    number: Count
    departed: tuple[Departed, ...]


class TakeSnapshot(_Message, frozen=True, tag="snapshot", array_like=True, gc=False):
    number: Count


class SnapshotTaken(_Message, frozen=True, tag="snapshot!", array_like=True, gc=False):
    """This shard's part is on disk; `progress` says what of the live leases is in it."""

    number: Count
    version: Count
    progress: tuple[Cover, ...]
    error: str = ""
    checksum: Count = 0
    examples: Count = 0  # behind that version


# ---------------------------------------------------------------- coordinator <-> evaluator


class Evaluate(_Message, frozen=True, tag="evaluate", array_like=True, gc=False):
    """Weights that turn out better than `best` are kept, where that was asked for."""

    number: Count
    best: float | None = None


class Evaluated(_Message, frozen=True, tag="evaluate!", array_like=True, gc=False):
    number: Count
    weights: Weights
    values: dict[str, float]
    error: str = ""  # why the weights could not be kept


# ---------------------------------------------------------------- Sandblaster: coordinator, shards and replicas


class Combine(_Message, frozen=True, array_like=True, gc=False):
    """target = the sum of coefficient x vector over the terms, of which there is at least one."""

    target: str
    terms: tuple[tuple[str, float], ...]


class Calculation(_Message, frozen=True, tag="vectors", array_like=True, gc=False):
    """Combine vectors, then form the dot products of all rows with all columns, and the largest magnitudes.

    `opens`: after combining, set `sum` to zero and take pushed portions of this evaluation from now on, of no other.
    """

    number: Count
    combine: tuple[Combine, ...] = ()
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    largest: tuple[str, ...] = ()
    opens: Count | None = None
    examples: Count = 0  # evaluated so far


class Calculated(_Message, frozen=True, tag="vectors!", array_like=True, gc=False):
    """Of this shard's range: the dot products, row by row, and the largest magnitudes."""

    number: Count
    values: tuple[float, ...]


class PortionRequest(_Message, frozen=True, tag="portion?", array_like=True, gc=False):
    """Ask for a portion, and tell of the one just computed (none: -1): its loss, a mean over its examples."""

    evaluation: Count = 0
    done: int = -1
    loss: float = 0.0
    finite: bool = True


class Portion(_Message, frozen=True, tag="portion", array_like=True, gc=False):
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


class PushPortions(_Message, frozen=True, tag="portions", array_like=True, gc=False):
    """The weighted sum of these portions' gradients lies in the sender's gradient buffer."""

    evaluation: Count
    buffer: Count
    portions: tuple[Count, ...]
    clock: Count  # pushes of the sender, with this one


class PortionsTaken(_Message, frozen=True, tag="portions!", array_like=True, gc=False):
    """From a shard: these are in its sum. The replica's buffer is free again."""

    evaluation: Count
    portions: tuple[Count, ...]


Message = (
    Join | Welcome | LeaseRequest | Grant | Progress | Dropped | Logged | NonFinite | Stop | Left
    | Skip | SkipNoted | Exchange | Exchanged | View | ViewSeen | TakeSnapshot | SnapshotTaken | Evaluate | Evaluated
    | Calculation | Calculated | PortionRequest | Portion | PushPortions | PortionsTaken
)  # fmt: skip


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a wire carries: a numbered message, or an acknowledgement alone (number 0, no message)."""

    number: Count  # 1, 2, 3 ... per link and direction
    seen: Count  # highest number received in order on this link
    message: Message | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    return _encoder.encode(frame)


def decode(data: bytes) -> Frame:
    """Raises `msgspec.DecodeError` or `ValueError` for anything that is not exactly a frame."""
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(data)} bytes is larger than {MAX_FRAME_BYTES}")
    frame: Frame = _decoder.decode(data)
    return frame
