"""All-reduce in a replica whose parts have no memory in common: which weights go from one to another.

Each part has the whole vector by itself, and steps on what it answers for. What one steps and others read goes through
the first part after every step; what that shows or saves comes to it before.
"""

from __future__ import annotations

from squall.parts.host import Collect, Speaker
from squall.parts.neighbours import Neighbours
from squall.parts.passing import Passing
from squall.protocol.effects import Effect, JoinGroup, Payload, WriteSnapshot
from squall.protocol.events import Event, GroupJoined, StepTaken
from squall.runtime.driver import Host, HostAround
from squall.runtime.job import Job


class FarRow(HostAround):
    """One part's end."""

    def __init__(self, host: Host, neighbours: Neighbours, job: Job) -> None:
        super().__init__(host)
        assert job.own is not None
        self._passing, self._weights = Passing(neighbours, job), job.own

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, Collect | WriteSnapshot):
            self._passing.bring(self._weights)
        if isinstance(effect, Collect):
            return None
        event = super().perform(effect, now)
        moved = isinstance(event, StepTaken) and event.finite
        if moved or (isinstance(effect, JoinGroup) and effect.transfer and isinstance(event, GroupJoined)):
            self._passing.share_steps(self._weights)
        return event


class ShowingSpeaker(Speaker):
    """Of the first part, which has all weights before it shows them."""

    def attach(self, payload: Payload) -> None:
        if payload.kind == "weights":
            self.perform(Collect(payload.clock, payload.buffer), 0.0)
        super().attach(payload)
