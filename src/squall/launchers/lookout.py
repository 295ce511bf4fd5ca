"""Looks at what a nursery's processes do, on the board that they share, and at how the kernel has them stand."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Collection
from dataclasses import replace

import msgspec

from squall.launchers.child import Child
from squall.launchers.leaving import explain
from squall.protocol.events import ActivitySeen, Event, ProcessesSeen
from squall.protocol.hangs import HANG_AFTER_S, Sight
from squall.runtime.board import Board
from squall.runtime.job import Job
from squall.runtime.processes import memory_kills, state_of, state_of_parts
from squall.strategies.work import Collective

LOOK_EVERY_S = 0.25  # as often as replicas report
DIES_WITHIN = 8  # looks, from when the kernel says that it kills a process until that has given its memory back
OUT_OF_MEMORY = ", as memory ran out: take fewer replicas or a smaller batch_size"
UNHEARD_AT_MOST = 2  # messages that wait for a coordinator that stands still, in a pipe that must not become full


class Lookout:
    def __init__(self, scripts: bool = False) -> None:
        """`scripts`: the replicas are users' loops."""
        self.at = 0.0  # when to look next
        self._board: Board | None = None
        self._scripts, self._own_time, self._in_parts = scripts, False, False
        self._after_s = HANG_AFTER_S
        self._memory_kills = deque([memory_kills()], DIES_WITHIN)  # as of each of the last looks

    def prepared(self, job: Job) -> Job:
        """With the board, which all processes inherit that are forked from here on."""
        backups = job.recipe.shards if job.plan.settings.copies > 1 else 0
        self._board = Board(job.recipe.replicas, job.recipe.shards, time.monotonic(), backups)
        # A loop may do anything between two batches, unless its user has said how long; and its steps wait for others.
        after_s = job.plan.settings.hang_after_s
        self._after_s = HANG_AFTER_S if after_s is None else after_s
        limited = bool(after_s) and not isinstance(job.recipe.work, Collective)
        self._own_time, self._in_parts = self._scripts and not limited, job.plan.settings.parts > 1
        return replace(job, board=self._board)

    def look(self, now: float, children: Collection[Child], unheard: int = 0) -> list[Event]:
        """If it is time and there are any: how they stand, and what they have done since the last look.

        `unheard`: messages of the nursery that nobody has acknowledged.
        """
        if now < self.at:
            return []
        self.at = now + LOOK_EVERY_S
        self._memory_kills.append(memory_kills())
        if not children or self._board is None:
            return []
        seen: list[Event] = []
        if self._after_s:
            seen.append(ProcessesSeen(tuple(self._sight(self._board, child) for child in children), self._after_s))
        if unheard < UNHEARD_AT_MOST:
            seen.append(ActivitySeen(self._board.read(now, {child.node: child.pid for child in children})))
        return seen

    def explain(self, code: int) -> str:
        """How a process has ended just now."""
        short = code == -signal.SIGKILL and memory_kills() > self._memory_kills[0]
        return explain(code) + (OUT_OF_MEMORY if short else "")

    def _sight(self, board: Board, child: Child) -> Sight:
        seen, state = board.sight(child.node), (state_of_parts if self._in_parts else state_of)(child.pid)
        begins = self._scripts and seen.moved < 0  # it is before its batches
        if (self._own_time or begins) and child.node.role == "replica":
            return Sight(child.node, seen.moved, state=state)
        return msgspec.structs.replace(seen, state=state)
