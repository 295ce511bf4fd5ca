"""What a machine wants done: imperative. Together with `notes`, which go into the record, a closed set.

Numbers never pass through a machine. Gradients and weights are named (`Payload`), and the shell knows where those lie.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from squall.protocol.collective.messages import Place
from squall.protocol.frames import Frame, Message
from squall.protocol.messages import Factors, SnapshotPiece
from squall.protocol.nodes import Node
from squall.protocol.nursery_messages import PartPlace
from squall.protocol.sandblaster.messages import Calculation


class Effect(msgspec.Struct, frozen=True, gc=False):
    """Something that the shell must do."""


PayloadKind = Literal["gradient", "weights", "trial", "piece", "copy"]


class Payload(msgspec.Struct, frozen=True, gc=False):
    """Numbers that belong to a message, by their place: a shard's range of a buffer of a replica or the evaluator.

    Every host has such a place, or all have the same in shared memory. A later clock, or version, replaces an earlier.
    The buffer of a piece of a file counts bytes, its clock pieces, its version is the snapshot's number, and its shard
    who has written it. A "copy" of all that a shard is counts bytes. A `part` of a replica has its own of that range.
    """

    kind: PayloadKind
    owner: Node  # of the buffer
    buffer: int
    clock: int  # the owner's, of the exchange
    shard: int  # whose range it is
    version: int = 0  # of a shard's weights: updates in them
    part: int = -1  # whose of that range it is; -1: all of it

    @property
    def slot(self) -> int:
        return self.owner.index


class Send(Effect, frozen=True, gc=False):
    """Give a message to the link. With a "weights" payload: the shard's current weights travel along."""

    to: Node
    message: Message
    payload: Payload | None = None


class Transmit(Effect, frozen=True, gc=False):
    """Put a frame on the wire now. `again`: its payload is at its place already, as that of a resend."""

    to: Node
    frame: Frame
    payload: Payload | None = None
    again: bool = False


class Admit(Effect, frozen=True, gc=False):
    """The process is on that machine, and may connect from there; it is called at the address, if that is given."""

    node: Node
    machine: int
    address: str = ""


class Forget(Effect, frozen=True, gc=False):
    """Drop the link to a node that is gone: nothing is resent to it any more."""

    node: Node


class MeetParts(Effect, frozen=True, gc=False):
    """Meet the other parts of this replica, which come from these machines. All else that it does, they do as well."""

    places: tuple[PartPlace, ...]


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
    """Put what a replica with an optimizer of its own has to push into a gradient buffer."""

    buffer: int


class Expect(Effect, frozen=True, gc=False):
    """These examples will be computed on soon: a data loader may begin with them."""

    epoch: int
    start: int
    stop: int


class UseWeights(Effect, frozen=True, gc=False):
    """Compute on this weights buffer from now on: a fetch into it has arrived."""

    buffer: int


class JoinGroup(Effect, frozen=True, gc=False):
    """Form a group with these replicas, in this order, under this number; who is behind gets the state of `source`.

    The state is weights and the optimizer's, of round `clock`. It travels only where somebody needs it (`transfer`).
    `places` are the members', where the run has several machines.
    """

    number: int
    members: tuple[Node, ...]
    source: Node
    transfer: bool
    clock: int
    places: tuple[Place, ...] = ()


class CutGroup(Effect, frozen=True, gc=False):
    """Have what is under way in the group fail soon, for all its members, unless it is over already."""


class Gather(Effect, frozen=True, gc=False):
    """Get from the group's members the weights of round `clock` that they have moved, where each has moved a share.

    In a group that has just formed also the optimizer's state of the shares that are the replica's now.
    """

    clock: int


class LeaveGroup(Effect, frozen=True, gc=False):
    """Leave the group, in which this replica has nothing under way."""


class Step(Effect, frozen=True, gc=False):
    """Take part in a step of the group: one optimizer step on the mean gradient of all its members' examples.

    The replica's own are [start, stop) of an epoch's order, and there may be none.
    """

    clock: int
    epoch: int
    start: int
    stop: int
    examples: int  # of all members


class Term(msgspec.Struct, frozen=True, gc=False):
    """One pushed gradient in an update. No other push of a run has the same owner and clock."""

    owner: Node
    buffer: int
    weight: float  # share of the update's sum; the weights of a mean add up to 1
    clock: int  # the owner's; the clock of its round may be a later one

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
    number: int = 0  # of all that this shard adds, from 1: what is asked for a second time is not added again


class WriteSnapshot(Effect, frozen=True, gc=False):
    """Write this shard's weights and optimizer state."""

    number: int
    version: int


class WritePiece(Effect, frozen=True, gc=False):
    """Write what a piece's payload has brought into a file of a snapshot, at its place."""

    shard: int  # or replica, that has sent it
    piece: SnapshotPiece
    part: int  # which file it is
    parts: int  # of so many


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
    """Launch a process for this node, on the nursery's machine, as `StartProcess` says."""

    node: Node
    first: PartPlace | None = None
    ends: Node | None = None


class KillMember(Effect, frozen=True, gc=False):
    """Kill this process of the nursery's machine; the answer is `ProcessEnded`, also where there is none."""

    node: Node
    why: str = ""  # it hangs


class KillMembers(Effect, frozen=True, gc=False):
    """Kill all processes of the nursery's machine, and say why."""

    why: str


class Cause(StrEnum):
    """Why a training is over. The audit calls an example missed only where the run, by this, should have trained it."""

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

    # "finished" | "interrupted" | "failed" | "nonfinite" (a batch twice) | "moved", to go on at once; nurseries: "left"
    status: str
    reason: str = ""  # or what went wrong
    cause: Cause = Cause.FAILED  # why the whole run ends, from the coordinator
