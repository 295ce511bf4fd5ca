"""A run's machines on a modelled cluster, in virtual time: started, killed as the cluster's failures go, restarted.

A replica or evaluator that dies is replaced in the run, as everywhere. A shard or coordinator that dies stands still
until it is repaired, and goes on where it was, as a successor does. One that goes with its machine ends the run, and so
do replicas without shards that die together; it begins again from its last snapshot once the machines are there, as
`squall resume` would.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

from squall.protocol.collective.coordinator import LOST
from squall.protocol.link import Linked
from squall.protocol.machine import Machine
from squall.protocol.nodes import COORDINATOR, NURSERY, Node
from squall.runtime.driver import Host
from squall.runtime.wire import Conditions
from squall.runtime.world import World
from squall.sim.cluster.costs import Costs
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.parts import FailureLaw, Preemption
from squall.sim.cluster.placement import UsedMachine

WATCHED_EVENTS = 1000
NEEDED = ("coordinator", "shard")  # a successor needs what they have left on their machine: without it a run ends

MakeMember = Callable[[Node, World], tuple[Linked | Machine, Host]]


class Rehearsal:
    """One run on a cluster. `run` goes to its end.

    Args:
        members: after a start or restart, at a virtual time, makes the machine and host of each of the run's nodes.
        nodes: that a run begins with.
        cluster: with its failures and preemptions.
        costs: of that cluster.
        seed: of all chance.
        hopeful: asked before a restart: whether there is any use in it.
    """

    def __init__(
        self, members: Callable[[float], MakeMember], nodes: list[Node], cluster: Cluster, costs: Costs, seed: int,
        hopeful: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self.restarts = 0
        self.lost = 0  # processes
        self._members = members
        self._nodes = nodes
        self._cluster = cluster
        self._costs = costs
        self._seed = seed
        self._hopeful = hopeful
        self._chance = random.Random(seed + 1)  # of failures, which are then the same for every strategy
        self._back_s: dict[tuple[str, int], float] = {}  # (role, index) -> when it is repaired
        self._preempts_s = [preemption.at_s for preemption in cluster.preemptions]  # the next time of each
        self._crashed = False
        self._start(0.0)

    @property
    def now(self) -> float:
        return self._world.now

    def run(self, watch: Callable[[float], None] = lambda now: None) -> None:
        """`watch` is told the virtual time now and then."""
        while True:
            try:
                while self._world.lively:
                    self._world.run(at_most=WATCHED_EVENTS)
                    watch(self._world.now)
                ended = self._world.processes[COORDINATOR].end if COORDINATOR in self._world.processes else None
                self._crashed |= ended is not None and ended.reason == LOST
            finally:
                self._world.close()
            if not self._crashed or not self._hopeful():
                return
            self.restarts += 1
            self._crashed = False
            self._start(self._restart_s())

    def _start(self, now: float) -> None:
        self._costs.clear()
        make = self._members(now)
        conditions = Conditions(
            self._costs, self._costs.prices, self._cluster.between.latency_s,
            lambda node: max(0.0, self._there_s(node) - self._world.now),
        )  # fmt: skip
        self._world = World(conditions, seed=self._seed, spawn=lambda node: make(node, self._world), now=now)
        self._costs.prolong = self._world.prolong
        self._world.add(NURSERY, *make(NURSERY, self._world))
        for node in self._nodes:
            self._world.bring(node)
            self._expect_failure(node.role, node.index)
        for number in range(len(self._preempts_s)):
            self._expect_preemption(number)

    def _restart_s(self) -> float:
        """When the coordinator and all shards can be there; machines may be taken away while the run is down."""
        needed = [node for node in self._nodes if node.role in NEEDED]
        at = self._world.now
        while True:
            for number, preemption in enumerate(self._cluster.preemptions):
                while self._preempts_s[number] < at:
                    self._take(preemption, self._preempts_s[number])
                    self._set_next(number)
            there = max(self._there_s(node) for node in needed)
            if there <= at:
                return at
            at = there

    def _there_s(self, node: Node) -> float:
        """When a process can be there: it is repaired, and so is its machine."""
        back_s = self._back_s.get((node.role, node.index), 0.0)
        return max(back_s, self._costs.placement.of(node).away_until)

    # ------------------------------------------------------------ failures

    def _expect_failure(self, role: str, index: int) -> None:
        failure = self._cluster.failures.get(role)
        if failure is not None:
            at = self.now + self._chance.expovariate(1 / failure.every_s)
            self._world.at(at, partial(self._fail, role, index, failure))

    def _fail(self, role: str, index: int, failure: FailureLaw) -> None:
        if role not in NEEDED or failure.fatal:
            self._kill(role, index, "its process failed", self.now + failure.repair_s)
        elif (node := Node(role, index)) in self._world.processes:
            self._world.pause(node, failure.repair_s)
            self.lost += 1
        self._expect_failure(role, index)

    def _kill(self, role: str, index: int, why: str, back_s: float, notice_s: float | None = None) -> None:
        for node in [node for node in self._world.processes if (node.role, node.index) == (role, index)]:
            self._world.kill(node, why, notice_s)
            self.lost += 1
            self._back_s[role, index] = back_s
            for place in self._costs.placement.parts_of(node):
                place.cores.forget(node)
            if role in NEEDED:
                self._crashed = self._world.ended = True

    def _expect_preemption(self, number: int) -> None:
        if self._preempts_s[number] < math.inf:
            self._world.at(self._preempts_s[number], partial(self._preempt, number))

    def _preempt(self, number: int) -> None:
        preemption = self._cluster.preemptions[number]
        for place in self._take(preemption, self.now):
            for role, index in self._costs.placement.on(place):
                why = f"its machine ({preemption.machine} {place.number}) was taken away"
                self._kill(role, index, why, self.now, self._cluster.lost_after_s)
        self._set_next(number)
        self._expect_preemption(number)

    def _set_next(self, number: int) -> None:
        every_s = self._cluster.preemptions[number].every_s
        self._preempts_s[number] += math.inf if every_s is None else every_s

    def _take(self, preemption: Preemption, at: float) -> list[UsedMachine]:
        able = [place for place in self._costs.placement.places if place.kind.name == preemption.machine]
        taken = sorted(self._chance.sample(able, preemption.count), key=lambda place: place.number)
        for place in taken:
            place.away_until = max(place.away_until, at + preemption.for_s)
        return taken
