"""A run in the calling process, in real time: the coordinator of all-reduce, one replica, and an evaluator."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from squall.launchers.inline import LoneChannel, run_to_end
from squall.protocol.collective.replica import CollectiveReplica
from squall.protocol.effects import Effect, End, EvaluateModel, KeepWeights, WriteSnapshot
from squall.protocol.evaluator import Evaluator
from squall.protocol.events import Event
from squall.protocol.nodes import COORDINATOR, Node
from squall.runtime.driver import Host, HostAround
from squall.runtime.hosts import EvaluatorHost
from squall.runtime.job import Job, own_model
from squall.runtime.lone import REPLICA, LoneReplica
from squall.runtime.machines import begun, collective_coordinator
from squall.runtime.recorder import CoordinatorHost
from squall.runtime.world import World

_NO_TRAINING = (EvaluateModel, KeepWeights, WriteSnapshot)


class LoneRun:
    """How it ended is said on the channel. What it says itself needs no links, for nothing is lost on the way."""

    def __init__(self, job: Job, channel: LoneChannel) -> None:
        self._channel = channel
        self._paused_s = 0.0
        self._world = world = World(now=self._clock())
        world.add(COORDINATOR, collective_coordinator(job), CoordinatorHost(job, channel, self._clock))
        if job.task.validate is not None:
            evaluator, keep = Node("evaluator", 1), job.plan.keep_best or ""
            host = EvaluatorHost(own_model(job))
            world.add(evaluator, Evaluator(evaluator, 0, os.getpid(), keep), _Unpaid(host, self._pause))
        replica = CollectiveReplica(REPLICA, 1, *begun(job), os.getpid())
        world.add(REPLICA, replica, _Unpaid(LoneReplica(job), self._pause))

    def run(self) -> End:
        """Training takes as long as it does: the world's time follows the clock."""

        def go() -> None:
            while self._world.lively:
                self._world.step()
                self._world.now = max(self._world.now, self._clock())

        return run_to_end(self._world, self._channel, go)

    def _clock(self) -> float:
        return time.monotonic() - self._paused_s

    def _pause(self, seconds: float) -> None:
        self._paused_s += seconds


class _Unpaid(HostAround):
    """Evaluations and snapshots are not training time."""

    def __init__(self, host: Host, pause: Callable[[float], None]) -> None:
        super().__init__(host)
        self._pause = pause

    def perform(self, effect: Effect, now: float) -> Event | None:
        if type(effect) not in _NO_TRAINING:
            return super().perform(effect, now)
        began = time.monotonic()
        try:
            return super().perform(effect, now)
        finally:
            self._pause(time.monotonic() - began)
