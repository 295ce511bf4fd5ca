"""What a protocol machine is, and the closed sets of events and effects that it speaks.

A machine is an object with `on(event, now) -> list[Effect]`. It holds all protocol state and touches nothing:
no socket, file, clock, thread or randomness (ruff's TID251 enforces it for this package). A shell feeds events
and carries out effects; the shells are the real driver (`runtime.driver`) and the virtual-time world
(`runtime.world`), which also serves as the inline driver.

Numbers never pass through a machine. Gradients and weights are named by reference (`Payload`), and the shell knows
where those lie: in shared memory, in a received frame, or nowhere at all in a simulation without gradients.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import Protocol

import msgspec

from squall.protocol.messages import Calculation, Factors, Frame, Message


class Node(msgspec.Struct, frozen=True, order=True, gc=False, cache_hash=True):
    """A process of a run. A replacement is a new node (next incarnation) with the same index.

    The index of a replica is its slot in the arena; the evaluator's slot, and index, comes after theirs.
    """

    role: str  # "coordinator" | "shard" | "replica" | "evaluator"
    index: int = 0
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.role}-{self.index}.{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> Node:
        role, _, rest = text.partition("-")
        index, _, incarnation = rest.partition(".")
        return cls(role, int(index), int(incarnation))


COORDINATOR = Node("coordinator")


@cache
def replica_node(slot: int, incarnation: int) -> Node:
    """One object for all who ask: looked up among thousands, the same object is found without being compared.

    There is no default for the incarnation: `cache` would keep a second object for those who leave it out.
    """
    return Node("replica", slot, incarnation)


@cache
def shard_nodes(count: int) -> tuple[Node, ...]:
    """One tuple for all who ask."""
    return tuple(Node("shard", index) for index in range(count))


# ---------------------------------------------------------------- events: past tense, with their outcome


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened to a node."""


class Started(Event, frozen=True, gc=False):
    """The process runs and its links can be used."""


class TimePassed(Event, frozen=True, gc=False):
    """The time that the machine named in `wake_at` has come."""


class FrameArrived(Event, frozen=True, gc=False):
    """Raw arrival, before the link has put it in order. Only `link.Linked` sees it."""

    sender: Node
    frame: Frame


class MessageArrived(Event, frozen=True, gc=False):
    """A message, in order and once."""

    sender: Node
    message: Message


class GradientComputed(Event, frozen=True, gc=False):
    """The answer to `Compute`. A gradient that is not finite was left out of the buffer."""

    loss: float  # mean over the batch; NaN with a finite gradient: not known
    finite: bool
    seconds: float
    factors: Factors = ()  # that a script's loop sets for this step
    extras: dict[str, float] | None = None  # what the loss returned beside itself
    over: bool = True  # else the loop may step on the batch again, until `BatchOver`


class BatchOver(Event, frozen=True, gc=False):
    """A script's loop steps on its batch no more."""


class BatchSkipped(Event, frozen=True, gc=False):
    """A script's loop leaves out the batch that `Compute` has given it: nothing of it is in the gradient buffer."""


class LoopLeft(Event, frozen=True, gc=False):
    """A script's loop takes no more batches: the one that it was given goes to others."""


class ValuesLogged(Event, frozen=True, gc=False):
    """The user's script has numbers for the record."""

    values: dict[str, float]


class MemberLost(Event, frozen=True, gc=False):
    """The launcher saw the process end without having been told to."""

    node: Node
    why: str


class StopRequested(Event, frozen=True, gc=False):
    """The user (or a cluster that takes the machine back) asks for a snapshot and an orderly end.

    `failed`: it is asked because a process cannot go on, so the run did not end well. `wanted`: a user's script has all
    that it wants, so it did.
    """

    why: str
    failed: bool = False
    wanted: bool = False


class SnapshotWritten(Event, frozen=True, gc=False):
    """The answer to `WriteSnapshot`: this shard's file is on disk."""

    number: int
    error: str = ""  # why the file could not be written, empty when it was
    checksum: int = 0  # of the file, which the manifest names


class ModelEvaluated(Event, frozen=True, gc=False):
    """The answer to `EvaluateModel`."""

    values: dict[str, float]  # "loss" and the task's metrics, means over the validation examples


class WeightsKept(Event, frozen=True, gc=False):
    """The answer to `KeepWeights`."""

    error: str = ""  # why that was not possible


class VectorsCalculated(Event, frozen=True, gc=False):
    """The answer to `CalculateVectors`."""

    number: int
    values: tuple[float, ...]


# ---------------------------------------------------------------- effects: imperative
# Those that tell something for the run's record are in `notes`.


class Effect(msgspec.Struct, frozen=True, gc=False):
    """Something that the shell must do."""


class Payload(msgspec.Struct, frozen=True, gc=False):
    """Numbers that belong to a message, by their place: a shard's range of a buffer of a replica or the evaluator.

    Every host has such a place, or all have the same in shared memory. A later clock, or version, replaces an earlier.
    """

    kind: str  # "gradient" | "weights" | "trial"
    owner: Node  # of the buffer
    buffer: int
    clock: int  # the owner's, of the exchange
    shard: int  # whose range it is
    version: int = 0  # of a shard's weights: updates in them

    @property
    def slot(self) -> int:
        return self.owner.index


class Send(Effect, frozen=True, gc=False):
    """Give a message to the link. With a "weights" payload: the shard's current weights travel along."""

    to: Node
    message: Message
    payload: Payload | None = None


class Transmit(Effect, frozen=True, gc=False):
    """Put a frame on the wire now. `again` marks a resend, whose payload is at its place already."""

    to: Node
    frame: Frame
    payload: Payload | None = None
    again: bool = False


class Forget(Effect, frozen=True, gc=False):
    """Drop the link to a node that is gone: nothing is resent to it any more."""

    node: Node


class Compute(Effect, frozen=True, gc=False):
    """Compute the gradient of examples [start, stop) of an epoch's order into a gradient buffer.

    With buffer -1 it stays where autograd made it, for a `Keep` that may follow.
    """

    epoch: int
    start: int
    stop: int
    buffer: int
    accumulate: bool  # add to what the buffer holds, or overwrite it
    local_step: bool  # move the replica's own weights by SGD, because no fetch follows this batch


class Keep(Effect, frozen=True, gc=False):
    """Put the gradient computed last, times a weight, into a gradient buffer."""

    buffer: int
    weight: float
    accumulate: bool  # add to what the buffer holds, or overwrite it


class PreparePush(Effect, frozen=True, gc=False):
    """Bring what a replica with an optimizer of its own has to push into a gradient buffer."""

    buffer: int


class Expect(Effect, frozen=True, gc=False):
    """These examples will be computed on soon: a data loader may begin with them."""

    epoch: int
    start: int
    stop: int


class UseWeights(Effect, frozen=True, gc=False):
    """Compute on this weights buffer from now on: a fetch into it has arrived."""

    buffer: int


class Term(msgspec.Struct, frozen=True, gc=False):
    """One pushed gradient in an update. Who pushed it and when tells it from all others of a run."""

    owner: Node
    buffer: int
    weight: float  # share of the update's sum; the weights of a mean add up to 1
    clock: int  # as the owner sent it; that of its round may be a later one

    @property
    def slot(self) -> int:
        return self.owner.index


class Apply(Effect, frozen=True, gc=False):
    """One update of a shard: the optimizer steps on the weighted sum of the terms.

    `share` (pushes in the update / live replicas) is how far the running means of the buffers move. `clock` is that of
    the push, or of the round. `rate` is a factor on the learning rates of this step, and so are `factors`.
    """

    terms: tuple[Term, ...]
    share: float
    clock: int
    rate: float = 1.0
    factors: Factors = ()  # that scripts' loops want


class CalculateVectors(Effect, frozen=True, gc=False):
    """Combine and multiply a shard's vectors (Sandblaster)."""

    calculation: Calculation


class AddPortions(Effect, frozen=True, gc=False):
    """Add what a replica's gradient buffer holds to the sum of the evaluation (Sandblaster)."""

    owner: Node
    buffer: int
    clock: int  # of the push


class WriteSnapshot(Effect, frozen=True, gc=False):
    """Write this shard's weights and optimizer state."""

    number: int
    version: int


class PublishSnapshot(Effect, frozen=True, gc=False):
    """All shards have written: make the snapshot visible, with the data position it belongs to."""

    number: int
    ledger: dict[str, object]
    versions: tuple[int, ...]
    examples: tuple[int, ...]  # behind each version
    progress: dict[str, int]  # lease -> upto
    checksums: tuple[int, ...]  # of each shard's file
    final: bool = False  # nothing is recorded any more that is not in it


class EvaluateModel(Effect, frozen=True, gc=False):
    """Evaluate the weights in a buffer on the validation set."""

    buffer: int


class KeepWeights(Effect, frozen=True, gc=False):
    """Keep the weights in a buffer as the run's best; those kept before are of no use any more."""

    buffer: int
    metric: str
    value: float
    updates: int
    examples: int


class StartMember(Effect, frozen=True, gc=False):
    """Launch a process for this node."""

    node: Node


class Cause(StrEnum):
    """Why a training is over. The audit judges by it: only what the run says it has trained can be missed."""

    DATA = "data"  # all of it is trained
    STEPS = "steps"
    SECONDS = "seconds"
    REACHED = "reached"  # a metric's target
    PATIENCE = "patience"  # a metric has not improved for long
    METHOD = "method"  # it has converged, or finds no further step
    SCRIPT = "script"  # it took no more batches, or `on_evaluation` wants no more
    STOPPED = "stopped"  # by the user, or by a cluster that takes the machine back
    FAILED = "failed"


class End(Effect, frozen=True, gc=False):
    """Leave the shell's loop: this node's work is over."""

    status: str  # "finished" | "interrupted" | "failed" | "nonfinite" (a batch gave NaN or Inf twice)
    reason: str = ""  # or what went wrong
    cause: Cause = Cause.FAILED  # of a whole run's end


class Machine(Protocol):
    """A protocol state machine."""

    @property
    def wake_at(self) -> float | None:
        """When `TimePassed` is wanted, on the shell's clock in seconds; None when nothing is waited for."""

    def on(self, event: Event, now: float) -> list[Effect]:
        """Take an event, change state, and say what must be done, in order."""
