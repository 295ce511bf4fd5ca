"""What a replica of all-reduce works on: its member of the group, and where its weights are shown and saved."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from squall.protocol.effects import (
    CutGroup,
    Effect,
    End,
    Expect,
    Gather,
    JoinGroup,
    LeaveGroup,
    Payload,
    Step,
    WriteSnapshot,
)
from squall.protocol.events import Event
from squall.protocol.nodes import Node
from squall.runtime.batches import Key
from squall.runtime.collective.holding import Holding
from squall.runtime.collective.meeting import fellows_of
from squall.runtime.collective.member import Member
from squall.runtime.collective.process import GroupedMember
from squall.runtime.driver import Host
from squall.runtime.job import Job
from squall.runtime.snapshot import Snapshots


class InGroup(Protocol):
    """A member, and how it reaches the others."""

    member: Member
    holding: Holding | None  # its share, where members divide the optimizer's state

    def state(self) -> dict[str, Tensor] | None: ...  # of the whole replica; None in a part that does not speak for it

    def join(self, effect: JoinGroup) -> Event | None: ...

    def step(self, effect: Step) -> Event | None: ...

    def gather(self, effect: Gather) -> Event | None: ...

    def cut(self) -> None: ...  # from another thread, which hears of it while something is under way

    def leave(self) -> None: ...

    def rest(self) -> None: ...


class CollectiveHost(Host):
    def __init__(self, job: Job, in_group: InGroup) -> None:
        self._job = job
        self._snapshots = Snapshots(job.directory)
        self.in_group = in_group

    def attach(self, payload: Payload) -> None:
        self._job.arena.weights(payload.slot, payload.buffer).copy_(self.in_group.member.vector)

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case Step():
                return self.in_group.step(effect)
            case JoinGroup():
                return self.in_group.join(effect)
            case Gather():
                return self.in_group.gather(effect)
            case Expect(epoch, start, stop):
                self.in_group.member.batches.expect(Key(epoch, start, stop))
            case CutGroup():
                self.in_group.cut()
            case LeaveGroup():
                self.in_group.leave()
            case WriteSnapshot(number):
                return self._write(number)
            case End():
                self.in_group.leave()
                self.in_group.member.batches.close()
            case _:
                raise AssertionError(f"a replica cannot {effect!r}")
        return None

    def part(self) -> tuple[int, int]:
        """Which part of a snapshot it writes, and of how many."""
        holding = self.in_group.holding
        return (0, 1) if holding is None else (holding.place, len(holding.bounds) - 1)

    def _write(self, number: int) -> Event | None:
        holding = self.in_group.holding
        if holding is None:
            state = self.in_group.state()
            whole = 0, self._job.layout.length
            return None if state is None else self._snapshots.write(number, 0, 1, state, whole)
        return self._snapshots.write(number, *self.part(), *holding.part())

    def rest(self) -> None:
        self.in_group.rest()


def in_a_process(job: Job, node: Node) -> CollectiveHost:
    """Of a replica whose fellows are in processes of their own."""
    member = Member(job, node.index)
    holding = Holding(member) if job.recipe.divided else None
    if job.inside is not None:
        from squall.parts.columns import ColumnMember  # which only replicas of several parts need
        from squall.parts.far_columns import columns_of

        return CollectiveHost(job, ColumnMember(member, job.inside, node, columns_of(job, member, node)))
    return CollectiveHost(job, GroupedMember(member, holding, node, fellows_of(job, node, member.device)))
