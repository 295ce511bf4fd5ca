"""What the coordinator tells for the run's record: a closed set of effects.

`runtime.recorder` makes rows of them. Forecasts add them up, and the proof's auditor holds them against what it saw.
"""

from __future__ import annotations

from typing import Literal

from squall.protocol.effects import Effect
from squall.protocol.ledger import Range
from squall.protocol.messages import Lease, Skip, Stats, Weights
from squall.protocol.nodes import Node
from squall.protocol.nursery_messages import Spent


class TrainingBegan(Effect, frozen=True, gc=False):
    """The first replica is welcomed: training time begins."""


class TrainingOver(Effect, frozen=True, gc=False):
    """Training time stands still from here on, while the final weights are evaluated and saved."""


class AnswersFound(Effect, frozen=True, gc=False):
    """The run goes on with what is in none of these ranges, which have the first numbers of leases."""

    ranges: tuple[tuple[int, int], ...]
    examples: int  # in them


class MemberJoined(Effect, frozen=True, gc=False):
    node: Node
    pid: int
    machine: int = 0
    others: tuple[int, ...] = ()  # machines of the replica's other parts, where they lie apart


class MemberLeft(Effect, frozen=True, gc=False):
    node: Node


class MemberDied(Effect, frozen=True, gc=False):
    node: Node
    why: str


class MemberReplaced(Effect, frozen=True, gc=False):
    node: Node  # that is started now
    where: str = ""  # and why there, where a run has several machines


class MachineAdded(Effect, frozen=True, gc=False):
    """A machine has joined a run that goes on."""

    machine: int
    room: int  # for so many replicas


class MachineDied(Effect, frozen=True, gc=False):
    """It is taken for lost, with these processes; should it come back, it finds that it was replaced."""

    machine: int
    nodes: tuple[Node, ...]
    why: str


class MachineLeft(Effect, frozen=True, gc=False):
    """In order: nothing of the run is there any more."""

    machine: int


class WorkReported(Effect, frozen=True, gc=False):
    node: Node
    stats: Stats


class ActivityTold(Effect, frozen=True, gc=False):
    """What processes of one machine have done."""

    machine: int
    spent: tuple[Spent, ...]


class LeaseEnded(Effect, frozen=True, gc=False):
    """Of the lease, [lease.start, done) was trained; the rest was given back."""

    lease: Lease
    holder: Node
    granted_s: float
    done: int


class BatchLeftOut(Effect, frozen=True, gc=False):
    """A script's loop leaves these examples out, or the coordinator does, since they gave NaN or Inf twice."""

    node: Node
    batch: Skip
    nonfinite: bool = False


class IterationDone(Effect, frozen=True, gc=False):
    """Of a method that looks at whole batches."""

    number: int
    loss: float
    trained: int  # examples so far


class UpdatesLost(Effect, frozen=True, gc=False):
    """A shard has died inside an update, and gone back from version `last` to its copy at version `first`.

    It has lost these examples, which are dealt again, or, where no others have to be trained, by a resume.
    """

    shard: int
    first: int
    last: int
    ranges: tuple[Range, ...]
    over: bool = False  # nothing is dealt any more


class EvaluationAsked(Effect, frozen=True, gc=False):
    """The evaluator will tell `WeightsMeasured`."""

    number: int


class WeightsMeasured(Effect, frozen=True, gc=False):
    """One evaluation, by the evaluator or by a user's script."""

    values: dict[str, float]  # by metric
    weights: Weights


class TargetReached(Effect, frozen=True, gc=False):
    text: str


class SnapshotAsked(Effect, frozen=True, gc=False):
    """What is told from here on may not be in it."""

    number: int


class Saving(Effect, frozen=True, gc=False):
    """A run that the user has stopped waits for files that arrive."""

    received: int  # bytes
    total: int  # bytes, as far as that is known


class Remark(Effect, frozen=True, gc=False):
    """What a person would want to be told beside all this."""

    kind: Literal["nonfinite", "warning", "error", "best"]
    text: str


# Somebody may be waiting to see it.
Urgent = MemberDied | MemberReplaced | MachineDied | UpdatesLost | TargetReached | Remark
Note = (
    WorkReported | ActivityTold | LeaseEnded | BatchLeftOut | EvaluationAsked | WeightsMeasured | IterationDone
    | SnapshotAsked | AnswersFound | TrainingBegan | TrainingOver | MemberJoined | MemberLeft | MachineAdded
    | MachineLeft | Saving
    | Urgent
)  # fmt: skip
