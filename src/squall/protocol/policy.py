"""What of a plan the coordinator must know."""

from __future__ import annotations

import msgspec

from squall.protocol.best import Goal

SAVE_WITHIN_S = 1.2  # beyond that, shards that have not written a small snapshot


class Policy(msgspec.Struct, frozen=True):
    """Times in seconds, of the coordinator's clock."""

    replicas: int
    shards: int
    evaluate: bool = True  # there is a validation set
    evaluate_every_s: float | None = None  # beside the one after each epoch
    until: tuple[str, float] | None = None  # end when this metric is reached (loss: falls to)
    seconds: float | None = None  # of training
    snapshot_every_s: float | None = 60.0
    save_within_s: float = SAVE_WITHIN_S  # the last snapshot of a run that a user stops
    goal: Goal = Goal()
