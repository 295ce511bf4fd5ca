"""Machines, their links and what befalls them: the parts of a `Cluster`, as plain data.

Inside there are seconds, bytes and bytes a second; in the file every quantity has its unit (docs/cluster.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from squall.sim.cluster.jitter import Constant, Jitter

ROLES = ("replica", "shard", "coordinator", "evaluator")
MEMORY, INTERFACE = 10e9, 1.25e9  # bytes/s, where a file says nothing: one core's copying, and 10 Gbit/s
ROUND_S, ROUND_PASSES = 500e-6, 14  # of all-reduce between two replicas of a machine, where a file says nothing
SEND_S, SEND_PASSES = 200e-6, 6  # of a part's numbers to another of its machine, where a file says nothing
DOORBELL_S = 50e-6  # an exchange of next to nothing, where a file says nothing
PASSES = 3  # over a shard's float32 elements in an exchange: the push is read, the weights are updated, and fetched


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What a run's own code takes of a core, in seconds, beside gradients and passes over vectors.

    Attributes:
        batch_s: of a replica, for each batch.
        exchange_s: of a replica, for each exchange with a shard.
        serve_s: of a shard, for each exchange.
        lease_s: of the coordinator, and of the replica that asks, for each lease.
        wake_s: of a shard that sleeps when a push comes, for being woken, and of the replica that wakes it.
        cold_s: of a shard or the coordinator, in addition, after a sleep of more than a millisecond, in which others
            have taken the caches.
    """

    batch_s: float = 0.0
    exchange_s: float = 0.0
    serve_s: float = 0.0
    lease_s: float = 0.0
    wake_s: float = 0.0
    cold_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MachineKind:
    """`count` machines that are alike.

    Attributes:
        cores: computations that run at once, each on a core of its own.
        step_s: seconds of one batch with nothing else on the machine; None: by `speed` (see `Cluster.step_s`).
        speed: steps a second, as a ratio to the first machine's.
        jitter: the law of a step's time around its mean.
        single_s: seconds of one batch of `SingleProcess`, everything included; None: see `Cluster.single_s`.
        overhead: of a run's processes.
        slowdown: [k - 1] is the factor on the step time while k computations run, 1 <= k <= cores; () is all 1.
        exchange: (elements, seconds) of a push + apply + fetch of a shard within the machine, rising in elements.
        reduce: (elements, seconds) that a round of all-reduce between two replicas of the machine takes beyond their
            steps: the sum of their gradients, the update, and a run's own code; rising in elements.
        send: (elements, seconds) until what a part of a replica sends is with another part on the machine, rising in
            elements.
        memory: bytes a second that one core reads and writes.
        interface: bytes a second, each way, that all processes of the machine share.
        carry: bytes a second that one core encrypts and sends to other machines, or receives.
        roles: what may be placed here.
    """

    name: str
    count: int = 1
    cores: int = 1
    step_s: float | None = None
    speed: float = 1.0
    jitter: Jitter = field(default_factory=Constant)
    single_s: float | None = None
    overhead: Overhead = Overhead()
    slowdown: tuple[float, ...] = ()
    exchange: tuple[tuple[int, float], ...] = ()
    reduce: tuple[tuple[int, float], ...] = ()
    send: tuple[tuple[int, float], ...] = ()
    memory: float = MEMORY
    interface: float = INTERFACE
    carry: float = math.inf
    roles: tuple[str, ...] = ROLES

    def slowdown_of(self, running: float, looking_out: int = 0) -> float:
        """Factor on the step time while so many computations run. Beyond the cores, they share them.

        The parts of a replica that wait for each other are fewer computations than parts: between two numbers the
        factor is linear. A process that looks out for a message takes a core as well, but none of the memory's
        bandwidth.
        """
        return self._slowed(running) * max(1.0, (running + looking_out) / self.cores)

    def _slowed(self, running: float) -> float:
        if not self.slowdown:
            return 1.0
        low = int(max(1.0, min(running, self.cores)))
        low_s, high_s = self.slowdown[low - 1], self.slowdown[min(low, self.cores - 1)]
        return low_s + max(0.0, min(running - low, 1.0)) * (high_s - low_s)

    def exchange_s(self, elements: float) -> float:
        """Seconds of an exchange of so many elements: linear between the measured sizes, proportional beyond them."""
        if not self.exchange:
            return DOORBELL_S + PASSES * 4 * elements / self.memory
        return _between(self.exchange, elements, DOORBELL_S)

    def round_s(self, elements: int) -> float:
        """Seconds of a round of all-reduce between two replicas, alike."""
        if not self.reduce:
            return ROUND_S + ROUND_PASSES * 4 * elements / self.memory
        return _between(self.reduce, elements, self.reduce[0][1])

    def send_s(self, elements: float) -> float:
        """Seconds until so many elements of a part are with another part on the machine, alike."""
        if not self.send:
            return SEND_S + SEND_PASSES * 4 * elements / self.memory
        return _between(self.send, elements, self.send[0][1])

    def work_s(self, elements: float) -> float:
        """Seconds of an exchange in which the shard passes over so many elements."""
        return self.exchange_s(elements) - self.doorbell_s

    @property
    def bell_s(self) -> float:
        """Seconds of an exchange in which neither end works: each doorbell has to be heard."""
        return max(0.0, self.doorbell_s - self.overhead.exchange_s - self.overhead.serve_s)

    @property
    def doorbell_s(self) -> float:
        """Seconds of an exchange of next to nothing."""
        return self.exchange_s(1)


def _between(points: Sequence[tuple[int, float]], elements: float, least_s: float) -> float:
    """Seconds, from `least_s` of nothing, unless the first point has less."""
    before = (0, min(least_s, points[0][1]))
    for point in points:
        if elements <= point[0]:
            part = (elements - before[0]) / (point[0] - before[0])
            return before[1] + part * (point[1] - before[1])
        before = point
    return before[1] * elements / before[0]


@dataclass(frozen=True, kw_only=True)
class Link:
    """What happens to a frame on its way. Its bandwidth is of one connection; interfaces limit all together."""

    latency_s: float
    jitter_s: float = 0.0  # uniform on top of the latency
    bandwidth: float = math.inf  # bytes/s
    loss: float = 0.0  # chance, 0 <= loss < 1


BETWEEN, WITHIN = Link(latency_s=100e-6), Link(latency_s=50e-6)  # where a file says nothing


@dataclass(frozen=True, kw_only=True)
class FailureLaw:
    """How often one process of a role fails, and how long its repair takes."""

    every_s: float  # mean of an exponential law
    repair_s: float
    fatal: bool = False  # nobody succeeds a shard or the coordinator: the run begins again from its last snapshot


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """So many machines of a kind go away, and come back after a while."""

    at_s: float
    machine: str
    count: int = 1
    for_s: float
    every_s: float | None = None  # and again so long after the beginning of the last time
