"""Hosts of a simulation: without gradients no numbers are there, and with them computations take virtual time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from squall.protocol.effects import (
    Compute,
    CutGroup,
    Effect,
    End,
    EvaluateModel,
    Gather,
    JoinGroup,
    LeaveGroup,
    Step,
    WriteSnapshot,
)
from squall.protocol.events import (
    Event,
    Gathered,
    GradientComputed,
    GroupJoined,
    ModelEvaluated,
    SnapshotWritten,
    StepTaken,
)
from squall.protocol.nodes import Node
from squall.runtime.arena import Arena, Shape
from squall.runtime.circle import Groups
from squall.runtime.driver import Host, HostAround
from squall.runtime.job import Job
from squall.runtime.run_plan import Plan
from squall.sim.cluster.costs import Costs
from squall.strategies import Strategy
from squall.task import Task
from squall.vector import Layout


def job_without_numbers(plan: Plan, strategy: Strategy, task: Task, layout: Layout) -> Job:
    """A job whose vectors are never looked at: thousands of replicas' buffers would not fit anywhere."""
    arena = Arena.private(Shape(1, 1))
    return Job(plan=plan, strategy=strategy, task=task, layout=layout, arena=arena, initial=torch.zeros(0),
               directory=Path())  # fmt: skip


class HostWithoutNumbers(Host):
    """A replica, shard or evaluator. All of a run can be one, since it remembers nothing."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def perform(self, effect: Effect, now: float) -> Event | None:
        if type(effect) is Compute:
            return GradientComputed(math.nan, True, self._costs.last_s)
        if type(effect) is WriteSnapshot:
            return SnapshotWritten(effect.number)
        return ModelEvaluated({}) if type(effect) is EvaluateModel else None


class MemberWithoutNumbers(Host):
    """A replica of all-reduce."""

    def __init__(self, node: Node, groups: Groups) -> None:
        self._node = node
        self._groups = groups
        self._number = 0

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case Step():
                self._groups.step(self._node, effect, None)
            case JoinGroup(number):
                self._number = number
                self._groups.join(self._node, effect, self)
            case Gather():
                self._groups.gather(self._node, effect)
            case CutGroup():
                self._groups.cut(self._node)
            case LeaveGroup() | End():
                self._groups.leave(self._node)
            case WriteSnapshot(number):
                return SnapshotWritten(number)
        return None

    def state(self) -> None:
        return None

    def take_up(self, state: None, clock: int) -> None:
        return None

    def joined(self, form: JoinGroup, members: Mapping[Node, object]) -> Event:
        return GroupJoined(form.number, form.clock)

    def gathered(self, form: JoinGroup, members: Mapping[Node, object]) -> Event:
        return Gathered(form.number)

    def reduced(self, effect: Step, parts: Mapping[Node, None]) -> Event:
        return StepTaken(self._number, math.nan, True, 0.0, 0.0)


class SimulatedTimes(HostAround):
    """A replica with a model, whose computations last as long as the cluster lets them."""

    def __init__(self, host: Host, costs: Costs) -> None:
        super().__init__(host)
        self._costs = costs

    def perform(self, effect: Effect, now: float) -> Event | None:
        event = self._host.perform(effect, now)
        if isinstance(event, GradientComputed):
            return GradientComputed(event.loss, event.finite, self._costs.last_s)
        return event
