"""All-reduce in a replica whose parts have no memory in common: which weights go from one to another.

Each part has the whole vector by itself, and steps on what it answers for. What one steps and others read goes through
the first part after every step; what that shows or saves comes to it before.
"""

from __future__ import annotations

from squall.parts.host import Collect, Speaker
from squall.parts.neighbours import SPEAKER, Neighbours
from squall.parts.passing import Share, hear, receive, say, sending
from squall.protocol.effects import Effect, JoinGroup, Payload, WriteSnapshot
from squall.protocol.events import Event, GroupJoined, StepTaken
from squall.runtime.driver import Host, HostAround
from squall.runtime.job import Job
from squall.vector import Layout


class FarRow(HostAround):
    """One part's end. All are made at the same time."""

    def __init__(self, host: Host, neighbours: Neighbours, job: Job) -> None:
        super().__init__(host)
        assert job.inside is not None
        assert job.own is not None
        self._row, self._weights = neighbours, job.own
        own = Share.of(job.inside)
        # By the other part: what it has alone, what it steps for some, and what others step for it.
        self._brought, self._coming, self._going = dict[int, Layout](), dict[int, Layout](), dict[int, Layout]()
        if neighbours.part == SPEAKER:
            shares = {other: hear(neighbours, other, Share) for other in range(1, neighbours.parts)}
            lacked = own.lacks().union(*(share.lacks() for share in shares.values()))
            for other, share in shares.items():
                say(neighbours, sorted(lacked), other)
                self._brought[other] = share.written(job.layout)
                self._coming[other] = job.layout.share(lacked.intersection(share.writes))
                self._going[other] = job.layout.share(share.lacks())
        else:
            say(neighbours, own, SPEAKER)
            self._brought[SPEAKER] = own.written(job.layout)
            self._going[SPEAKER] = job.layout.share({*own.writes}.intersection(hear(neighbours, SPEAKER, list[str])))
            self._coming[SPEAKER] = job.layout.share(own.lacks())

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, Collect | WriteSnapshot):
            (self._receive if self._row.part == SPEAKER else self._send)(self._brought)
        if isinstance(effect, Collect):
            return None
        event = super().perform(effect, now)
        moved = isinstance(event, StepTaken) and event.finite
        if moved or (isinstance(effect, JoinGroup) and effect.transfer and isinstance(event, GroupJoined)):
            steps = (self._receive, self._coming), (self._send, self._going)
            for carry, what in steps if self._row.part == SPEAKER else reversed(steps):
                carry(what)
        return event

    def _send(self, what: dict[int, Layout]) -> None:
        given = what.items()
        on_way = [w for other, layout in given for w in sending(self._row, layout.regions(self._weights), other)]
        for wait in on_way:
            wait()

    def _receive(self, what: dict[int, Layout]) -> None:
        for other, layout in what.items():
            receive(self._row, layout.regions(self._weights), other)


class ShowingSpeaker(Speaker):
    """Of the first part, which has all weights before it shows them."""

    def attach(self, payload: Payload) -> None:
        if payload.kind == "weights":
            self.perform(Collect(payload.buffer), 0.0)
        super().attach(payload)
