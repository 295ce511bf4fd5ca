"""The cores of one machine, which the computations on it share: while k run, each is as slow as was measured for k."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from squall.protocol.nodes import Node
from squall.sim.cluster.parts import MachineKind

Prolong = Callable[[Node, float], None]  # a process is busy until a later time than it was told
COLD_AFTER_S = 1e-3  # a process that has slept for longer finds the caches with others' data
HAIR_S = 1e-12  # what is left of a computation that is over, by rounding


@dataclass(slots=True)
class _Computation:
    began: float
    left: float  # seconds that it would take alone
    stretch: float  # the process sleeps afterwards, until all has taken so many times as long
    spin_s: float  # it looks out afterwards: it keeps its core for so long, unless it begins the next
    load: float  # cores that it keeps busy, mean: a replica's parts may wait for each other
    until: float  # as foreseen


class Cores:
    """Processor sharing. When a computation ends is foreseen as if nothing else began; what begins then puts it off."""

    __slots__ = ("_asleep_at", "_at", "_kind", "_running", "_spinning", "alone")

    def __init__(self, kind: MachineKind) -> None:
        self.alone = True  # one process has them all
        self._kind = kind
        self._running: dict[Node, _Computation] = {}
        self._spinning: dict[Node, float] = {}  # processes that look out -> until when
        self._asleep_at: dict[Node, float] = {}  # since when
        self._at = 0.0  # the time from which every `left` counts

    def take(
        self, node: Node, begins: float, seconds: float, prolong: Prolong, stretch: float = 1.0, spin_s: float = 0.0,
        load: float = 1.0,
    ) -> float:  # fmt: skip
        """Begin a computation of so many seconds alone, or add it to the node's own; returns the seconds to its end.

        A node that neither works nor looks out sleeps, and takes longer for it (`Overhead`).
        """
        if self.alone:
            return seconds * stretch
        job = self._running.get(node)
        if job is not None and job.until > begins - HAIR_S:
            job.left += seconds
        else:
            self._advance(begins)
            if self._spinning.pop(node, None) is None:
                seconds += self._waking_s(node, begins)
            job = self._running[node] = _Computation(begins, seconds, stretch, spin_s, load, until=begins)
        self._foresee(node, prolong)
        return job.began + (job.until - job.began) * job.stretch - begins

    def _waking_s(self, node: Node, now: float) -> float:
        if node.role not in ("shard", "coordinator"):
            return 0.0
        code = self._kind.overhead
        cold_s = code.cold_s if now - self._asleep_at.get(node, now) > COLD_AFTER_S else 0.0
        return cold_s + code.wake_s if node.role == "shard" else cold_s

    def forget(self, node: Node) -> None:
        """The node's process is gone. The others, which are faster now, are told when the next computation begins."""
        for known in (self._running, self._spinning, self._asleep_at):
            known.pop(node, None)

    def clear(self) -> None:
        """Nothing runs any more."""
        for known in (self._running, self._spinning, self._asleep_at):
            known.clear()

    def _advance(self, now: float) -> None:
        while self._running and self._at < now:
            slowdown = self._kind.slowdown_of(self._load(), len(self._spinning))
            shortest = min(job.left for job in self._running.values())
            until = min(now, self._at + shortest * slowdown, *self._spinning.values())
            for node, job in list(self._running.items()):
                job.left -= (until - self._at) / slowdown
                if job.left <= HAIR_S:
                    del self._running[node]
                    if job.spin_s:
                        self._spinning[node] = until + job.spin_s
                    else:
                        self._asleep_at[node] = until
            self._at = until
            self._rest()
        self._at = max(self._at, now)
        self._rest()

    def _load(self) -> float:
        return sum(job.load for job in self._running.values())

    def _rest(self) -> None:
        """Processes that have looked out for long enough go to sleep."""
        for node in [node for node, until in self._spinning.items() if until <= self._at]:
            self._asleep_at[node] = self._spinning.pop(node)

    def _foresee(self, beginner: Node, prolong: Prolong) -> None:
        """Foresee when each computation ends if no other begins, and put off those that end later than was foreseen."""
        at, done = self._at, 0.0
        spinning = list(self._spinning.values())
        heapify(spinning)
        by_length = sorted(self._running.items(), key=lambda item: item[1].left)
        load = self._load()
        for node, job in by_length:
            left, done = job.left - done, job.left
            while spinning:
                slowdown = self._kind.slowdown_of(load, len(spinning))
                if at + left * slowdown <= spinning[0]:
                    break
                left -= (spinning[0] - at) / slowdown
                at = heappop(spinning)
            at += left * self._kind.slowdown_of(load, len(spinning))
            load -= job.load
            if job.spin_s:
                heappush(spinning, at + job.spin_s)
            if at > job.until + HAIR_S:
                job.until = at
                if node != beginner:
                    prolong(node, job.began + (at - job.began) * job.stretch)
