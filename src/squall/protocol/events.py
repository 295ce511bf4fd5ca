"""What happens to a node: past tense, with its outcome. A closed set."""

from __future__ import annotations

from typing import Any

import msgspec

from squall.protocol.frames import Frame, Message
from squall.protocol.hangs import Sight
from squall.protocol.messages import Factors
from squall.protocol.nodes import Node
from squall.protocol.nursery_messages import Spent


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


class PeerReached(Event, frozen=True, gc=False):
    """A connection to this peer is there, and carries nothing of what was sent before. Only `link.Linked` sees it."""

    node: Node


class PeerRefused(Event, frozen=True, gc=False):
    """A peer has sent what no process sends. Only `link.Linked` sees it."""

    node: Node
    why: str


class PeersHeard(Event, frozen=True, gc=False):
    """Something has come from these, on other machines, though perhaps no whole message. Only `link.Linked` sees it."""

    nodes: tuple[Node, ...]


class MessageArrived(Event, frozen=True, gc=False):
    """A message, in order and once."""

    sender: Node
    message: Message


class GradientComputed(Event, frozen=True, gc=False):
    """The answer to `Compute`. A gradient that is not finite was left out of the buffer."""

    loss: float  # mean over the batch; NaN beside a finite gradient means that the loss is not known
    finite: bool
    seconds: float
    factors: Factors = ()  # that a script's loop sets for this step
    extras: dict[str, float] | None = None  # what the loss returned beside itself
    over: bool = True  # False: the loop may step on the batch again, until `BatchOver`
    inside: tuple[float, ...] = ()  # what the host has measured since it began, which goes into the record as it is
    spoilt: bool = False  # neither are the weights finite that it was computed on


class GroupJoined(Event, frozen=True, gc=False):
    """The answer to `JoinGroup`: all members are there, and have the same weights.

    Where each has a share of the optimizer's state, all who had one have moved it as far, and weights are to `Gather`.
    """

    number: int  # of the group
    clock: int = 0  # round that the replica's share has moved by; counts where it has one


class Gathered(Event, frozen=True, gc=False):
    """The answer to `Gather`: the weights are those of all others."""

    number: int  # of the group


class GroupBroken(Event, frozen=True, gc=False):
    """The answer to `JoinGroup`, `Step` or `Gather` where a member was lost, or the connection to it."""

    number: int
    why: str
    lost: bool = False  # nobody is left who has the optimizer's state of some parameters


class StepTaken(Event, frozen=True, gc=False):
    """The answer to `Step`. Where the mean is not finite nobody has moved; the `guilty` know that it is their batch."""

    number: int  # of the group
    loss: float  # mean over the replica's own examples
    finite: bool
    compute_s: float
    wait_s: float  # for others, beyond what computing has hidden
    extras: dict[str, float] | None = None
    guilty: bool = False
    inside: tuple[float, ...] = ()  # as in `GradientComputed`


class Answered(Event, frozen=True, gc=False):
    """The answer to `Answer`."""

    seconds: float
    size: int = 0  # bytes of what the model said


class AnswersKept(Event, frozen=True, gc=False):
    """The answer to `KeepAnswers`: they stay, whoever dies, or have to travel first."""

    size: int = 0  # bytes that have to travel to the coordinator's machine
    error: str = ""  # why they could not be written


class AnswersTaken(Event, frozen=True, gc=False):
    """The answer to `WriteAnswers`."""

    node: Node
    lease: int
    error: str = ""  # why the file could not be written


class BatchOver(Event, frozen=True, gc=False):
    """A script's loop steps on its batch no more."""


class BatchSkipped(Event, frozen=True, gc=False):
    """A script's loop leaves out the batch that `Compute` has given it: nothing of it is in the gradient buffer."""


class LoopLeft(Event, frozen=True, gc=False):
    """A script's loop takes no more batches: the one that it was given goes to others."""


class PushAsked(Event, frozen=True, gc=False):
    """To a part that exchanges by itself: the first part is about to push this buffer."""

    clock: int
    buffer: int


class ValuesLogged(Event, frozen=True, gc=False):
    """The user's script has numbers for the record."""

    values: dict[str, float]


class ProcessEnded(Event, frozen=True, gc=False):
    """A process of the nursery's machine has ended without having been told to, or could not be started."""

    node: Node
    why: str
    torn: bool = False  # a shard, inside an update


class LeaveRequested(Event, frozen=True, gc=False):
    """The nursery's machine is to be taken away. It leaves in order if it can."""

    why: str


class LauncherLost(Event, frozen=True, gc=False):
    """The nursery's connection to the launching process, on another machine, is over, and so is the run soon."""


class MachineJoined(Event, frozen=True, gc=False):
    """The launcher has a nursery on one more machine, with room for so many replicas. That of the first is told."""

    machine: int
    room: int


class StopRequested(Event, frozen=True, gc=False):
    """The user (or a cluster that takes the machine back) asks for a snapshot and an orderly end.

    `failed`: a process cannot go on, so the run does not end well. `wanted`: a user's script has all that it wants, so
    the run ends well.
    """

    why: str
    failed: bool = False
    wanted: bool = False


class SnapshotWritten(Event, frozen=True, gc=False):
    """The answer to `WriteSnapshot`: this shard's file is on disk, of the coordinator's machine or of another."""

    number: int
    error: str = ""  # why the file could not be written, empty when it was
    checksum: int = 0  # of the file, which the manifest names
    size: int = 0  # bytes that have to travel to the coordinator's machine; 0: the file is there


class CopyMade(Event, frozen=True, gc=False):
    """The shard's numbers of this version have a copy in memory that outlives its process."""

    version: int


class NumbersTorn(Event, frozen=True, gc=False):
    """The process before this one has died inside an update: the numbers are those of the copy again."""

    version: int  # of the copy
    last: int  # to which the numbers had come, before that update


class CopyKnown(Event, frozen=True, gc=False):
    """The answer to `CopyTo` or `CopyMore`: what was asked for is ready to travel, in so many bytes."""

    backup: Node
    size: int
    last: bool = True  # there is nothing more


class CopyTaken(Event, frozen=True, gc=False):
    """The answer to `TakeCopy`: the machine that is backed (`protocol.copied`); of further parts None."""

    copied: Any
    whole: bool = True  # all numbers are there


class Moved(Event, frozen=True, gc=False):
    """The shard, or the coordinator, goes on on another machine than before."""


class PieceWritten(Event, frozen=True, gc=False):
    """The answer to `WritePiece`."""

    part: int
    number: int  # of the snapshot
    error: str = ""


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


class ActivitySeen(Event, frozen=True, gc=False):
    """To a nursery: what the processes on its machine have done since the last time."""

    spent: tuple[Spent, ...]


class ProcessesSeen(Event, frozen=True, gc=False):
    """To a nursery: how the processes on its machine stand, all of them at once; none hangs before `after_s`."""

    sights: tuple[Sight, ...]
    after_s: float


_KINDS = tuple(Event.__subclasses__())
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_encode = msgspec.msgpack.Encoder().encode


def pack(event: Event) -> tuple[int, bytes]:
    """Its kind, and what it has."""
    return _NUMBERS[type(event)], _encode(event)


def unpack(kind: int, data: bytes | memoryview) -> Event:
    """Raises `msgspec.DecodeError`, `ValueError` or `IndexError` for what is no event."""
    return msgspec.msgpack.decode(data, type=_KINDS[kind])
