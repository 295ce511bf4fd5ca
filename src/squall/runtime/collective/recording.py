"""The schedule of a replica of all-reduce: groups that it has joined, steps that it began, and what came of them.

A step is written before it is taken: what a member brings to it others may finish, though it does not live to do so.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from squall.protocol.effects import Effect, End, JoinGroup, Step, WriteSnapshot
from squall.protocol.events import Event, GroupJoined, StepTaken
from squall.runtime import schedule
from squall.runtime.driver import Host, HostAround
from squall.runtime.inside import Inside
from squall.runtime.records import SEEN, ClockSteps, Fingerprint, moved
from squall.runtime.schedule import ScheduleWriter


def looked_at(weights: Tensor, inside: Inside | None) -> Tensor:
    """float32 [elements]: what of a member's weights a schedule has checksums of, as its first part has them.

    Of several parts it is a run that the first moves, because they may have no memory in common.
    """
    if inside is None:
        return weights
    runs = [region for region in inside.writes.regions(weights) if region.is_contiguous()]
    return max(runs, key=Tensor.numel, default=weights[:1]).view(-1)


class RecordedMember(HostAround):
    """Records a member in a process of its own, or in one for each of its parts."""

    def __init__(self, host: Host, vector: Tensor, log: ScheduleWriter, unused: Callable[[], bool]) -> None:
        """`vector` has weights that the host moves; `unused`: whether some batch does not use all parameters."""
        super().__init__(host)
        self._vector, self._unused = vector, unused
        self._log = log
        self._clocks = ClockSteps()
        self._fingerprint = Fingerprint(vector)

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, Step):
            clock, *batch = effect.clock, effect.epoch, effect.start, effect.stop, effect.examples
            self._log.add([schedule.STEPPED, self._clocks.steps(0, clock), *batch])
        event = super().perform(effect, now)
        match effect, event:
            case Step(), StepTaken():
                check = self._fingerprint() & SEEN if event.finite else 0
                self._log.add([schedule.MOVED, moved(check, event.finite, event.guilty)])
            case JoinGroup(), GroupJoined():
                self._fingerprint = Fingerprint(self._vector, effect.clock)
                self._log.add([schedule.FORMED, effect, self._unused()])
            case WriteSnapshot(number, clock), _:
                self._log.add([schedule.SAVED, number, clock])
            case End(), _:
                self._log.close()
        return event
