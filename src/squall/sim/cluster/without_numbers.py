"""Hosts of a simulation: without gradients no numbers are there, and with them computations take virtual time."""

from __future__ import annotations

import math

from squall.protocol.effects import Compute, Effect, EvaluateModel, WriteSnapshot
from squall.protocol.events import Event, GradientComputed, ModelEvaluated, SnapshotWritten
from squall.runtime.driver import Host, HostAround
from squall.sim.cluster.costs import Costs


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
