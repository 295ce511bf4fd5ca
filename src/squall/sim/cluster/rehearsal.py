"""A run's machines on a modelled cluster, in virtual time: started, killed as the cluster's failures go, restarted.

A replica or evaluator that dies is replaced in the run, as everywhere. A shard or coordinator that dies ends the run,
which begins again from its last snapshot once the process is repaired, as `squall resume` would.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from squall.protocol.core import Node
from squall.protocol.link import Linked
from squall.runtime.driver import Host
from squall.sim.cluster.costs import Costs
from squall.sim.cluster.model import Cluster, Preemption
from squall.sim.cluster.placement import Place
from squall.sim.direct import Direct
from squall.sim.world import World

NOTICED_AFTER_S = 1.0  # until the coordinator knows that a process on another machine is gone
WATCHED_EVENTS = 1000

Member = Callable[[Node], tuple[Linked | Direct, Host]]


class Rehearsal:
    """One run on a cluster. `run` goes to its end.

    Args:
        members: after a start or restart, at a virtual time, makes the machine and host of each of the run's nodes.
        nodes: that a run begins with.
        cluster: with its failures and preemptions.
        costs: of that cluster.
        seed: of all chance.
    """

    def __init__(
        self, members: Callable[[float], Member], nodes: list[Node], cluster: Cluster, costs: Costs, seed: int
    ) -> None:
        self.restarts = 0
        self._members = members
        self._nodes = nodes
        self._cluster = cluster
        self._costs = costs
        self._seed = seed
        self._chance = random.Random(seed + 1)  # of failures, which are then the same for every strategy
        self._repaired_s: float | None = None  # when a run that has crashed can begin again
        self._world = self._start(0.0)

    @property
    def now(self) -> float:
        return self._world.now

    def run(self, watch: Callable[[float], None] = lambda now: None) -> None:
        """`watch` is told the virtual time now and then."""
        while True:
            while self._world.lively:
                self._world.run(at_most=WATCHED_EVENTS)
                watch(self._world.now)
            if self._repaired_s is None:
                return
            self.restarts += 1
            at, self._repaired_s = self._repaired_s, None
            self._world = self._start(at)

    def _start(self, now: float) -> World:
        member = self._members(now)
        world = World(
            network=self._costs, seed=self._seed, duration=self._costs.duration, spawn=member, now=now,
            notice_s=NOTICED_AFTER_S, spawn_s=lambda node: self._absence_s(node, world.now),
        )  # fmt: skip
        self._costs.prolong = world.prolong
        for node in self._nodes:
            world.add(node, *member(node))
            self._expect_failure(world, node.role, node.index)
        for preemption in self._cluster.preemptions:
            self._expect_preemption(world, preemption)
        return world

    # ------------------------------------------------------------ failures

    def _expect_failure(self, world: World, role: str, index: int) -> None:
        failure = self._cluster.failures.get(role)
        if failure is not None:
            at = world.now + self._chance.expovariate(1 / failure.every_s)
            world.at(at, partial(self._fail, world, role, index))

    def _fail(self, world: World, role: str, index: int) -> None:
        self._kill(world, role, index, "its process failed")
        self._expect_failure(world, role, index)

    def _kill(self, world: World, role: str, index: int, why: str) -> None:
        for node in [node for node in world.places if (node.role, node.index) == (role, index)]:
            world.kill(node, why)
            if role in ("shard", "coordinator"):
                again = world.now + self._absence_s(node, world.now)
                self._repaired_s = max(again, self._repaired_s or 0.0)
                world.ended = True

    def _absence_s(self, node: Node, now: float) -> float:
        """Until a process that is gone can be there again."""
        failure = self._cluster.failures.get(node.role)
        repair_s = failure.repair_s if failure is not None else 0.0
        return max(repair_s, self._costs.placement.of(node).away_until - now)

    def _expect_preemption(self, world: World, preemption: Preemption) -> None:
        at = preemption.at_s
        while at <= world.now:
            if preemption.every_s is None:
                return
            at += preemption.every_s
        world.at(at, partial(self._preempt, world, preemption))

    def _preempt(self, world: World, preemption: Preemption) -> None:
        for place in self._taken(preemption):
            place.away_until = world.now + preemption.for_s
            for role, index in self._costs.placement.on(place):
                self._kill(world, role, index, f"its machine ({preemption.machine} {place.number}) was taken away")
        self._expect_preemption(world, preemption)

    def _taken(self, preemption: Preemption) -> list[Place]:
        able = [place for place in self._costs.placement.places if place.kind.name == preemption.machine]
        return sorted(self._chance.sample(able, preemption.count), key=lambda place: place.number)
