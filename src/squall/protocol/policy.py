"""What of a plan the coordinator must know."""

from __future__ import annotations

import math

import msgspec

from squall.protocol.best import Goal
from squall.protocol.heartbeats import Pulse
from squall.protocol.nodes import Node

SAVE_WITHIN_S = 1.0  # how long a small snapshot is waited for after a user's stop


class MachineRoom(msgspec.Struct, frozen=True):
    """A machine of a run: how many parts of replicas it has room for, and what it begins with.

    Parts that are in no machine's `nodes` lie where their replica is.
    """

    machine: int
    places: int
    nodes: tuple[Node, ...] = ()


class Policy(msgspec.Struct, frozen=True):
    """Times in seconds, of the coordinator's clock."""

    replicas: int
    shards: int
    evaluate: bool = True  # there is a validation set
    evaluate_every_s: float | None = None  # beside the evaluation after each epoch
    until: tuple[str, float] | None = None  # end when this metric is reached (loss: falls to)
    seconds: float | None = None  # of training
    snapshot_every_s: float | None = 60.0
    snapshot_first_s: float = math.inf  # the first one sooner, and each of the next twice as long after the last
    save_within_s: float = SAVE_WITHIN_S  # how long the last snapshot of a run that a user stops may take
    goal: Goal = Goal()
    rooms: tuple[MachineRoom, ...] = ()  # empty: one machine, with room for all; who is in none waits for room
    parts: int = 1  # of each replica
    copies: int = 1  # of each shard: with two it has a backup
    deputy: bool = False  # so has the coordinator
    spread_parts: bool | None = False  # over as many machines as there are, whatever room each has; None: over no two
    loaders: int = 0  # processes that load a replica's batches
    quarantine: int = (
        0  # batches of an epoch that are left out at most, as they give NaN or Inf twice; the next ends it
    )
    succeeds: bool = False  # shards leave what their successors need
    goes_back: bool = False  # to its newest snapshot, by itself, when weights are lost with a machine
    pulse: Pulse = Pulse()  # of the nurseries on other machines than the coordinator's
