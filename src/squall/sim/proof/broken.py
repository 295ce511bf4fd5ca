"""What must hold in every world, and the error where it does not."""

from __future__ import annotations

from typing import Protocol

from squall.protocol.nodes import Node

INVARIANTS = {
    "I1": "no acknowledged push is lost, unless a death inside an update is said to have taken it",
    "I2": "none is applied twice",
    "I3": "staleness stays within its bound, and is reported as it is",
    "I4": "every example of an epoch is trained, and repeats are those that the audit names",
    "I5": "a run whose faults heal ends",
    "I6": "weights are the log, applied one entry after the other, behind a copy where a death has torn them",
    "I7": "what is measured is labelled with what was in the weights that it was measured on",
    "I8": "a run that the user stops ends in time, whoever stands still, and saves what arrives",
    "I9": "the best weights are kept, as they were measured, before the record tells of them",
    "I10": "replicas are where room is for them: on no machine too many, and none is nowhere while there is room",
    "I11": "processes of a machine that was replaced end",
    "I12": "nobody says what is refused; who does is heard no more, and nobody is heard who may be another",
    "I13": "a run that moves in order has a last snapshot to go on from",
    "I14": "where the first machine is gone, the others end soon",
    "I15": "where members divide an optimizer's state, two have the newest of each parameter",
    "I16": "a replica that lies on several machines works with its own parts, and none outlives it",
    "I17": "a member of a group announces each batch to its loaders before it steps on it",
    "I18": "each example is answered once, and what counts is on the disk",
    "I19": "who is said to be waited for is who lets others go on, and machines tell of their own processes alone",
    "I20": "what a coordinator tells is in the record once, whoever goes on in its place",
    "I21": "what is left out for NaN or Inf gave it twice, is no more than may be, and only more than that ends a run",
    "I22": "a process that hangs is killed in time, and none that goes on by itself or stands still with its machine",
    "I23": "what a shard lets others hear its backup has, and goes on from it where it takes over",
    "I24": "a shard, or the coordinator, goes on in the place of its backup when that has ended",
    "I25": "of a coordinator and its deputy one goes on at most",
    "I26": "a deputy's record is its coordinator's, and goes on from it",
    "I27": "a shard corrects a push with the weights that this was computed on",
    "I28": "what a process says to another leaves in its order: no connection carries a number behind a higher one",
}


class Watcher(Protocol):
    """An auditor, of whatever kind of work."""

    def watch(self, now: float, node: Node, what: object) -> None:
        """Raise `Broken` where an invariant does not hold."""


class Broken(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant} ({INVARIANTS[invariant]}): {text}")
        self.invariant = invariant
