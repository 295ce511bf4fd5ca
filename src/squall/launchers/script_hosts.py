"""Hosts of a replica whose computing is a user's script: they leave a batch to it, and take what it has made of it."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from squall.launchers.control_pipe import ControlPipe
from squall.parts.host import Watch
from squall.parts.neighbours import NeighbourLost
from squall.protocol.effects import Compute, CutGroup, Effect, JoinGroup, Step, UseWeights
from squall.protocol.events import Event, GroupBroken, LoopLeft, StepTaken
from squall.protocol.messages import Factors, Inside
from squall.protocol.nodes import Node
from squall.runtime.backward import Backward
from squall.runtime.collective.apart import Apart
from squall.runtime.collective.host import CollectiveHost
from squall.runtime.collective.loop import LoopMember, Stepped
from squall.runtime.driver import Host, HostAround
from squall.runtime.hosts import ReplicaHost
from squall.runtime.job import Job
from squall.runtime.kinds import host
from squall.runtime.recording import RecordedReplica, recorded

Extras = dict[str, float] | None  # of a step, for the record


class Ending:
    """Hears how the run ends."""

    def __init__(self, pipe: ControlPipe, watch: Watch | None) -> None:
        """`watch`: over the replica's other parts."""
        self._pipe, self._watch = pipe, watch
        self.over: dict[str, Any] | None = None

    def look(self) -> None:
        """Raises `NeighbourLost` where another part has ended."""
        if self.over is None and (not self._pipe.open or self._pipe.connection.poll()):
            self.hear()
        if self._watch is not None and self._watch.ended():
            raise NeighbourLost("another part of this replica has ended")

    def hear(self) -> None:
        self.over = self._pipe.hear() or {"status": "failed", "reason": "the nursery is gone"}


class ShardedHost(ReplicaHost):
    """Of a replica that exchanges with shards.

    Attributes:
        wanted: the batch that the loop is to compute on next.
        ready: the loop may go on behind a step.
        seen: the host that the driver has, which may keep a schedule.
    """

    def __init__(self, job: Job, node: Node, ending: Ending) -> None:
        super().__init__(job, node.index, own=job.own)
        self._ending = ending
        self.in_use, self.uses = 0, 0  # the weights buffer, and how often one was taken into use
        self.wanted: Compute | None = None
        self.ready = False
        self.seen = recorded(self, job, node)

    @property
    def backward(self) -> Backward:
        return self.training.backward

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, Compute):
            self.wanted = effect
            return None
        if isinstance(effect, UseWeights):
            self.ready, self.in_use, self.uses = True, effect.buffer, self.uses + 1
        return super().perform(effect, now)

    def poll(self) -> Event | None:
        self._ending.look()
        return None

    def accept(
        self, effect: Compute, loss: float | None, started: float, factors: Factors, over: bool, extras: Extras,
        inside: Inside,
    ) -> tuple[bool, Event | None]:  # fmt: skip
        """Whether the gradients are finite, as far as is known, and what the machine is to hear at once."""
        found = replace(self.training.accept(effect, loss, started, factors, over), extras=extras, inside=inside)
        if isinstance(self.seen, RecordedReplica):
            self.seen.computed(effect, found.finite)
        if over or not found.finite:
            self.wanted = None
        self.ready = over or not found.finite  # else newer weights come
        return found.finite, found

    def skip(self, effect: Compute) -> None:
        self.wanted = None
        if isinstance(self.seen, RecordedReplica):
            self.seen.computed(effect, finite=False, left_out=True)

    def leave(self) -> Event:
        """The batch that is wanted is given up."""
        self.wanted = None
        return LoopLeft()

    def close(self) -> None:
        """The training is over."""


class GroupedHost(HostAround):
    """Of a member of a group. Its attributes are those of `ShardedHost`.

    A loop may take any time between two steps, in which others wait for it. So a thread does that here, and a view or
    a stop is heard meanwhile.
    """

    def __init__(self, job: Job, node: Node, ending: Ending) -> None:
        self._member = LoopMember.of(job, node)
        self._apart = Apart(host(job, node, CollectiveHost(job, self._member)))
        super().__init__(self._apart)
        self._ending = ending
        self.backward = self._member.member.backward
        self.ready = False
        self.seen: Host = self
        self._step: Step | None = None  # that the loop is to compute for
        self._number = 0  # of the group
        self._extras: Extras = None
        self._left = False

    @property
    def wanted(self) -> Compute | None:
        """None also while the thread is at work, which has the same model."""
        if self._step is None or self._apart.busy:
            return None
        step = self._step
        return Compute(step.epoch, step.start, step.stop, 0, accumulate=False, local_step=False)

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, JoinGroup):
            self._number = effect.number
        if not isinstance(effect, Step) or effect.start == effect.stop:
            return super().perform(effect, now)
        self._step = effect
        return self.leave() if self._left else None

    def poll(self) -> Event | None:
        self._ending.look()
        event = super().poll()
        if isinstance(event, StepTaken | GroupBroken):
            self.ready = True
        return replace(event, extras=self._extras) if isinstance(event, StepTaken) else event

    def accept(
        self, effect: Compute, loss: float | None, started: float, factors: Factors, over: bool, extras: Extras,
        inside: Inside,
    ) -> tuple[bool, Event | None]:  # fmt: skip
        assert self._step is not None
        self._member.stepped, self._extras = Stepped(loss, started, factors), extras
        step, self._step, self.ready = self._step, None, False
        return True, super().perform(step, 0.0)

    def skip(self, effect: Compute) -> None:
        self._step = None

    def leave(self) -> Event:
        """The others are kept waiting by nobody: for them the group breaks, as it does when one dies."""
        self._left, self._step = True, None
        return GroupBroken(self._number, "a script takes no more batches")

    def close(self) -> None:
        self.perform(CutGroup(), 0.0)
        self._apart.finish()
