"""All-reduce on a cluster: what a round of a group takes once its members have their gradients.

What a round of two replicas takes beyond their steps was measured (`MachineKind.reduce`). What it takes with a single
element each member pays, however many share a machine: three and four replicas of a small model took two cores 10 %
less than that. Beyond that it is the optimizer's update, as in an exchange, and the sum. A ring of n members carries
2 (n - 1) / n of its bytes through each of them, both ways.

torch sums a bucket when all members have it, the first ones while gradients are still computed. So between machines
only what the last buckets need of the interfaces is waited for; on one machine that is in what was measured.

Parts of replicas reduce what is theirs at the same time, each in a column of its own, when all is computed; and a
replica's parts tell each other that they have their sums. All columns of a machine share its interface.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from squall.protocol.effects import Gather, JoinGroup, Step
from squall.protocol.events import Event, StepTaken
from squall.protocol.nodes import Node
from squall.runtime.circle import Circle, Circling, Work
from squall.runtime.world import World
from squall.sim.cluster.costs import FORWARD_SHARE, STATE, UPDATE_SHARE, Costs
from squall.sim.cluster.parts import Link
from squall.sim.cluster.placement import UsedMachine
from squall.strategies.work import ring_share
from squall.vector import Layout

FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes, of DistributedDataParallel
FORM_S = 0.1  # until a group has its connections


def buckets_of(layout: Layout) -> tuple[int, ...]:
    """Elements of each of torch's buckets, in the order in which gradients come; the model's buffers are the last."""
    found, end, limit = [], layout.tail, FIRST_BUCKET
    for span in reversed(layout.parameters):
        if span is layout.parameters[0] or 4 * (end - span.start) >= limit:
            found.append(end - span.start)
            end, limit = span.start, BUCKET
    return (*found, *([layout.length - layout.tail] if layout.tail < layout.length else []))


class Ring:
    """A `Circle` whose rounds take as long as the cluster lets them; its members' events say so."""

    def __init__(self, world: World, costs: Costs, between: Link, layout: Layout, parts: int = 1) -> None:
        self._world = world
        self._costs = costs
        self._between = between
        self._length = layout.length
        self._parts = parts
        self._buckets = buckets_of(layout)
        self._circle = Circle(world, self._delays, self._timed)
        self.began: dict[Node, float] = {}  # the round under way
        self.computed_s: dict[Node, float] = {}  # of it, the update included

    def join(self, node: Node, effect: JoinGroup, member: Circling) -> None:
        self._circle.join(node, effect, member)

    def step(self, node: Node, effect: Step, part: Any) -> None:
        self.began[node] = self._world.now
        self._circle.step(node, effect, part)

    def gather(self, node: Node, effect: Gather) -> None:
        self._circle.gather(node, effect)

    def cut(self, node: Node) -> None:
        self._circle.cut(node)

    def leave(self, node: Node) -> None:
        self._circle.leave(node)

    def _timed(self, node: Node, event: Event) -> Event:
        """A step tells what it took."""
        if not isinstance(event, StepTaken):
            return event
        computed_s = self.computed_s[node]
        return replace(event, compute_s=computed_s, wait_s=max(0.0, self._world.now - self.began[node] - computed_s))

    # ------------------------------------------------------------ seconds

    def _delays(self, nodes: Sequence[Node], effect: Work) -> list[float]:
        on = Counter(self._costs.placement.of(node) for node in nodes)
        if isinstance(effect, JoinGroup):
            state_s = 4 * (1 + STATE) * self._length / self._bandwidth(on) if effect.transfer else 0.0
            return [FORM_S + state_s] * len(nodes)
        if isinstance(effect, Gather):
            self._costs.bytes += len(nodes) * round(2 * 4 * self._length * ring_share(len(nodes)) / 2)
            carried_s = 4 * self._length * ring_share(len(nodes)) / 2 / self._bandwidth(on)
            return [carried_s] * len(nodes)
        now = self._world.now
        computed_s = max(now - self.began[node] for node in nodes)
        wire_s = self._wire_s(on, len(nodes), computed_s) if len(on) > 1 else 0.0
        self._costs.bytes += len(nodes) * round(2 * 4 * self._length * ring_share(len(nodes)))
        return [self._finish(node, len(nodes), wire_s) for node in nodes]

    def _finish(self, node: Node, members: int, wire_s: float) -> float:
        """Seconds until the member has its update. Meanwhile each of its parts takes a core."""
        place, now = self._costs.placement.of(node), self._world.now
        kind, length = place.kind, -(-self._length // self._parts)
        least_s, update_s, slowed = kind.round_s(1), UPDATE_SHARE * kind.work_s(length), kind.slowdown_of(2)
        pair_s = max(0.0, kind.round_s(length) - least_s - slowed * update_s)
        agreed_s = 2 * kind.send_s(1) if self._parts > 1 else 0.0
        if members == 1:
            least_s = 0.0
        # Two at once were measured, and are here what each takes alone.
        own_s = (least_s + ring_share(members) * pair_s) / slowed + update_s + agreed_s
        self.computed_s[node] = min(now, self._world.processes[node].busy_until) - self.began[node] + update_s
        busy_s = place.cores.take(node, now, own_s, self._costs.prolong, load=self._parts)
        self._world.prolong(node, now + busy_s)
        return max(wire_s + least_s / slowed + update_s + agreed_s, busy_s) if wire_s else busy_s

    def _wire_s(self, on: Counter[UsedMachine], members: int, computed_s: float) -> float:
        """The ring passes each machine's interface once each way."""
        bandwidth, latency_s = self._bandwidth(on), 2 * (members - 1) * self._between.latency_s
        if self._parts > 1:
            return latency_s + 4 * self._length * ring_share(members) / bandwidth
        sums = [latency_s + 4 * size * ring_share(members) / bandwidth for size in self._buckets]
        return self._tail_s(sums, computed_s)

    def _bandwidth(self, on: Mapping[UsedMachine, int]) -> float:
        """Bytes a second from one member to the next, of the slowest."""
        if len(on) == 1:
            return min(place.kind.memory for place in on)
        return min(self._between.bandwidth, *(place.kind.interface for place in on))

    def _tail_s(self, sums: Sequence[float], computed_s: float) -> float:
        """Seconds beyond the computing, where a bucket's sum begins with its gradients or after the sum before."""
        ready, over = FORWARD_SHARE * computed_s, 0.0
        for size, seconds in zip(self._buckets, sums):
            ready += (1 - FORWARD_SHARE) * computed_s * size / self._length
            over = max(over, ready) + seconds
        return max(0.0, over - computed_s)
