"""What everything takes on a cluster: how long effects keep a process, and when a message arrives.

The model, in the order of what matters:

- a batch takes its machine's step time, times a factor drawn from its law, and is slowed down by whatever else computes
  on the machine for as long as that does (`cores.py`);
- a shard works off pushes one after another. Its work on one is what the machine was measured to need for an exchange
  of so many elements beyond a doorbell: 3 of 5 passes over them are the update, 2 the copy of the weights;
- a run's own code takes cores as well: of replicas, shards and the coordinator so much as was measured. Who looks out
  for an answer keeps its core meanwhile;
- between machines a payload takes its part of the interfaces of both ends, and the link's latency on top. All that pass
  an interface at a time share it alike, but for what goes from one machine to the same other over a slow link: of that
  one goes after the other. Within a machine nothing but doorbells travels.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from squall.launchers.role_processes import SPIN_S
from squall.protocol.effects import (
    AddPortions,
    Apply,
    CalculateVectors,
    Compute,
    Effect,
    EvaluateModel,
    Keep,
    KeepWeights,
    PreparePush,
    Send,
    Step,
    Transmit,
    UseWeights,
    WriteSnapshot,
)
from squall.protocol.nodes import Node, part_nodes
from squall.protocol.notes import LeaseEnded
from squall.runtime.wire import Passage, Price
from squall.sim.cluster.cores import Prolong
from squall.sim.cluster.gradients import GradientTimes
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.placement import Placement, UsedMachine
from squall.sim.cluster.sharing import Lane, Together, Transfer, Way
from squall.strategies import Recipe
from squall.transports.lanes import FAR_S, FAST

UPDATE_SHARE = 3 / 5  # of a shard's work on an exchange: read gradient and weights, write weights; the rest copies
SUM_SHARE = 2 / 5  # for each further gradient in a mean: read it, write the sum
FORWARD_SHARE = 1 / 3  # of a step's time, for an example that is only evaluated
CONTROL_BYTES = 200  # of a message without its payload
DISK = 500e6  # bytes a second that a shard writes into a snapshot
STATE = 2  # optimizer state and weights, in vectors


@dataclass(frozen=True)
class Workload:
    """What a task costs, beside its numbers. `step_s` is of one batch on the cluster's first machine, alone."""

    step_s: float
    batch_size: int
    elements: tuple[int, ...]  # of each shard; without shards, of the vector
    validation: int = 0  # examples


class Costs:
    """The `prices` and the `Wire` of a `World` that is a cluster. Adds up what travels."""

    def __init__(
        self, cluster: Cluster, recipe: Recipe, workload: Workload, placement: Placement, chance: random.Random,
        slow: float | None = None,
    ) -> None:  # fmt: skip
        self.placement = placement
        self.prolong: Prolong = lambda node, until: None  # called where the end of a computation is put off by another
        self.last_s = 0.0  # of the computation that was begun last
        self.bytes = 0  # sent from machine to machine, or put into shared memory
        self.messages = 0
        self.busy_s = 0.0  # of all shards together
        self.computed = 0  # examples
        self._recipe = recipe
        self._workload = workload
        self._chance = chance
        self._slowest = 1 / slow if slow is not None else 1.0  # of the last replica, which sleeps after each step
        self._between, self._within = cluster.between, cluster.within
        self._gradients = GradientTimes(cluster, placement, workload.step_s, chance)
        self._fetched = [4 * count for count in workload.elements]  # bytes of an exchange with each shard
        self._pushed = [count // recipe.work.blocks for count in self._fetched]
        self._whole, self._parts = sum(workload.elements), cluster.parts
        self._own = self._whole / self._gradients.parts  # that each part passes over
        self._shards = [placement.of(Node("shard", index)) for index in range(recipe.shards)]
        work = [place.kind.work_s(count // recipe.work.blocks) for place, count in zip(self._shards, workload.elements)]
        code = [place.kind.overhead.serve_s / 2 for place in self._shards]  # half of it around each
        self._updates = [UPDATE_SHARE * seconds + half for seconds, half in zip(work, code)]
        self._copies = [(1 - UPDATE_SHARE) * seconds + half for seconds, half in zip(work, code)]
        on = [placement.computing[place] for place in self._shards]
        # A shard looks out for the next push where replicas leave it a core of its own, and none comes from elsewhere.
        self._spin_s = 0.0 if placement.several else SPIN_S
        self._spins = [self._spin_s if there <= place.kind.cores else 0.0 for place, there in zip(self._shards, on)]
        self.prices: dict[type[Effect], Price] = {
            Compute: self._compute, Step: self._step, Send: self._message, Transmit: self._message, Apply: self._apply,
            AddPortions: self._add_portions, CalculateVectors: self._vectors, LeaseEnded: self._lease,
            EvaluateModel: self._evaluate, Keep: lambda node, effect, begins: self._passes(node, 2, self._whole),
            WriteSnapshot: lambda node, effect, begins: 4 * STATE * self._held(node) / DISK,
            KeepWeights: lambda node, effect, begins: 4 * self._whole / DISK,
        }  # fmt: skip
        if not recipe.shards:
            del self.prices[LeaseEnded]  # it is in the time of a round
        if recipe.work.local is not None:
            for own_weights in (UseWeights, PreparePush):
                self.prices[own_weights] = lambda node, effect, begins: self._passes(node, 3, self._own)
        self._last: dict[tuple[Node, Node], float] = {}  # link -> last arrival, where a message could overtake another
        fastest = max(kind.interface for kind in cluster.machines)
        jitter_s = cluster.between.jitter_s + cluster.within.jitter_s
        self._overtakes = jitter_s > 0 or cluster.between.bandwidth < fastest
        self._carried = any(kind.carry < math.inf for kind in cluster.machines)
        self._transfers: dict[tuple[Node, Node], Transfer] = {}  # the last between two processes
        self._lanes: defaultdict[tuple[UsedMachine, UsedMachine], Lane] = defaultdict(Lane)  # between two machines

    def clear(self) -> None:
        """A run has ended, and may begin again."""
        for place in self.placement.places:
            place.clear()
        self._last.clear()
        self._transfers.clear()
        self._lanes.clear()

    # ------------------------------------------------------------ time of effects

    def _compute(self, node: Node, effect: Compute, begins: float) -> float:
        self.computed += effect.stop - effect.start
        place = self.placement.of(node)
        seconds, load = self._gradients.lasts(node, (effect.stop - effect.start) / self._workload.batch_size)
        code = place.kind.overhead
        seconds += code.batch_s + code.exchange_s * self._recipe.shards / self._recipe.work.every
        if effect.accumulate:  # what the buffer holds is read once more
            seconds += self._passes(node, 1, self._own)
        if self._recipe.work.local is not None:  # an optimizer step on the whole vector
            seconds += UPDATE_SHARE * place.kind.work_s(self._own)
        stretch = self._slowest if node.index == self._recipe.replicas - 1 else 1.0
        self.last_s = seconds = self._at_replica(node, begins, seconds, stretch, self._spin_s, load)
        return seconds

    def _step(self, node: Node, effect: Step, begins: float) -> float:
        self.computed += effect.stop - effect.start
        seconds, load = self._gradients.lasts(node, (effect.stop - effect.start) / self._workload.batch_size)
        stretch = self._slowest if node.index == self._recipe.replicas - 1 else 1.0
        return self._at_replica(node, begins, seconds, stretch, 0.0, load)

    def _at_replica(
        self, node: Node, begins: float, seconds: float, stretch: float, spin_s: float, load: float
    ) -> float:  # fmt: skip
        """Parts on other machines than the first keep cores there."""
        held = self.placement.parts_of(node)
        if len(held) == 1:
            return held[0].cores.take(node, begins, seconds, self.prolong, stretch, spin_s, load)
        took = []
        for place, parts in Counter(held).items():
            own = load * parts / len(held)
            took.append(place.cores.take(node, begins, seconds, self.prolong, stretch, spin_s, own))
        return max(took)

    def _message(self, node: Node, effect: Send | Transmit, begins: float) -> float:
        if node.role != "shard":  # a replica that shows its weights
            return self._passes(node, 2, self._whole)
        return self._at_shard(node, self._copies[node.index], begins)

    def _apply(self, node: Node, effect: Apply, begins: float) -> float:
        seconds = self._updates[node.index]
        if len(effect.terms) > 1:
            seconds *= 1 + (len(effect.terms) - 1) * SUM_SHARE / UPDATE_SHARE
        return self._at_shard(node, seconds, begins)

    def _add_portions(self, node: Node, effect: AddPortions, begins: float) -> float:
        return self._at_shard(node, self._passes(node, 3, self._workload.elements[node.index]), begins)

    def _vectors(self, node: Node, effect: CalculateVectors, begins: float) -> float:
        calculation = effect.calculation
        passes = 3 * len(calculation.combine) + len(calculation.rows) + len(calculation.columns)
        return self._at_shard(node, self._passes(node, passes, self._workload.elements[node.index]), begins)

    def _evaluate(self, node: Node, effect: EvaluateModel, begins: float) -> float:
        place = self.placement.of(node)
        step_s = self._gradients.steps[id(place.kind)]
        seconds = FORWARD_SHARE * step_s * self._workload.validation / self._workload.batch_size
        return place.cores.take(node, begins, seconds, self.prolong)

    def _lease(self, node: Node, effect: LeaseEnded, begins: float) -> float:
        place = self.placement.of(node)
        lease_s = place.kind.overhead.lease_s
        return place.cores.take(node, begins, lease_s, self.prolong) if lease_s else 0.0

    def _at_shard(self, node: Node, seconds: float, begins: float) -> float:
        place, spin_s = self._shards[node.index], self._spins[node.index]
        if not place.cores.alone:
            seconds = place.cores.take(node, begins, seconds, self.prolong, spin_s=spin_s)
        self.busy_s += seconds
        return seconds

    def _held(self, node: Node) -> int:
        """Elements of the vector that are the node's own."""
        return self._workload.elements[node.index] if node.role == "shard" else self._whole

    def _passes(self, node: Node, passes: int, elements: float) -> float:
        return 4 * passes * elements / self.placement.of(node).kind.memory

    # ------------------------------------------------------------ messages

    def arrivals(
        self, sender: Node, effect: Send | Transmit, now: float, chance: random.Random
    ) -> Sequence[float | Passage]:
        seats, to, payload = self.placement.seats, effect.to, effect.payload
        if payload is not None and self._parts > 1 and payload.part < 0 and self.placement.apart(sender, to):
            return self._parcels(sender, effect, now, chance)
        try:
            source, target = seats[sender], seats[to]
        except KeyError:  # the first message from or to somebody
            source, target = self.placement.of(sender), self.placement.of(to)
        size = 0
        if payload is not None and sender.role != "coordinator":  # it sends none: the evaluator is on its machine
            sizes = self._pushed if payload.kind == "gradient" else self._fetched
            size = sizes[sender.index if sender.role == "shard" else to.index]
            if payload.part >= 0:
                size //= self._parts
        self.messages += 1
        self.bytes += size
        if source is target:
            link = self._within
            rings = sender.role == "shard" or effect.to.role == "shard"
            at = now + (source.kind.bell_s / 2 if rings else link.latency_s)
        else:
            link = self._between
            if link.loss and chance.random() < link.loss:
                return ()
            size += CONTROL_BYTES
            begun = None
            if payload is not None and self._carried:
                begun = partial(self._carry, (source, sender), (target, to), size)
            behind = self._transfers.get((sender, to)) if self._transfers else None
            lasting = size > source.brief or size > target.brief
            if lasting or (behind is not None and not behind.arrived):
                latency_s = link.latency_s + (chance.random() * link.jitter_s if link.jitter_s else 0.0)
                ways, lane = self._ways(source, target, lasting), self._lane(source, target, lasting)
                transfer = Transfer(now, size, ways, latency_s, behind, begun, lane)
                self._transfers[sender, to] = transfer
                return (transfer,)
            if begun is not None:
                begun(now)
            # The bytes flow through both interfaces at once, as fast as the slowest of them and the link lets them.
            begins = now if now > source.sends_until else source.sends_until
            source.sends_until = at = begins + size / source.kind.interface
            free = begins if begins > target.receives_until else target.receives_until
            target.receives_until = received = free + size / target.kind.interface
            if received > at:
                at = received
            alone = begins + size / link.bandwidth
            at = (alone if alone > at else at) + link.latency_s
        if link.jitter_s:
            at += chance.random() * link.jitter_s
        if self._overtakes:  # and the machines on both ends count on the order
            at = self._last[sender, effect.to] = max(at, self._last.get((sender, effect.to), 0.0))
        return (at,)

    def _parcels(self, sender: Node, effect: Send | Transmit, now: float, chance: random.Random) -> Sequence[Passage]:
        """Each part exchanges by itself: it is over when all have."""
        to, payload, found = effect.to, effect.payload, list[float | Passage]()
        assert payload is not None
        replica = to if sender.role == "shard" else sender
        for part, node in enumerate((replica, *part_nodes(replica, self._parts))):
            self.placement.seats[node] = self.placement.parts_of(replica)[part]
            one, other = (node, to) if sender == replica else (sender, node)
            found += self.arrivals(one, replace(effect, to=other, payload=replace(payload, part=part)), now, chance)
        return (Together(found),) if len(found) == self._parts else ()  # else one is lost, and all are sent again

    def _carry(
        self, sends: tuple[UsedMachine, Node], receives: tuple[UsedMachine, Node], size: int, now: float
    ) -> None:
        """A thread of the process does so on each end, which may have a core of its own."""
        for place, node in (sends, receives):
            seconds = size / place.kind.carry
            if seconds:
                place.cores.take(Node(f"{node.role}'s carrier", node.index), now, seconds, self.prolong)

    def _lane(self, source: UsedMachine, target: UsedMachine, lasting: bool) -> Lane | None:
        """In which one transfer waits for the other, where the link is slow and not long."""
        slowest = min(source.kind.interface, target.kind.interface, self._between.bandwidth)
        lane = lasting and slowest < FAST and 2 * self._between.latency_s < FAR_S
        return self._lanes[source, target] if lane else None

    def _ways(self, source: UsedMachine, target: UsedMachine, lasting: bool) -> tuple[Way, ...]:
        """What takes long shares the interfaces with all that passes meanwhile. It has a connection to itself."""
        own = (Way(self._between.bandwidth),) if self._between.bandwidth < math.inf else ()
        return (source.sends, target.receives, *own) if lasting else own
