"""Looks at what a nursery's processes do, on the board that they share."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from squall.launchers.child import Child
from squall.protocol.events import ActivitySeen
from squall.runtime.board import Board
from squall.runtime.job import Job

LOOK_EVERY_S = 0.25  # as often as replicas report
UNHEARD_AT_MOST = 100  # messages that wait for a coordinator that stands still; then one tells of all that passed


class Lookout:
    def __init__(self) -> None:
        self.at = 0.0  # when to look next
        self._board: Board | None = None

    def prepared(self, job: Job) -> Job:
        """With the board, which all processes inherit that are forked from here on."""
        self._board = Board(job.recipe.replicas, job.recipe.shards, time.monotonic())
        return replace(job, board=self._board)

    def look(self, now: float, children: Iterable[Child], unheard: int = 0) -> ActivitySeen | None:
        """What they have done since the last look, if it is time and there are any.

        `unheard`: messages of the nursery that nobody has acknowledged.
        """
        if now < self.at:
            return None
        self.at = now + LOOK_EVERY_S
        if unheard >= UNHEARD_AT_MOST:
            return None
        pids = {child.node: child.pid for child in children}
        return ActivitySeen(self._board.read(now, pids)) if pids and self._board is not None else None
