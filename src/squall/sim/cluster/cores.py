"""The cores of one machine, which the computations on it share: while k run, each is as slow as was measured for k."""

from __future__ import annotations

from collections.abc import Callable

from squall.protocol.core import Node
from squall.sim.cluster.model import Machine

Prolong = Callable[[Node, float], None]  # a process is busy until a later time than it was told
HAIR_S = 1e-12  # what is left of a computation that is over, by rounding


class _Job:
    __slots__ = ("began", "left", "stretch", "until")

    def __init__(self, began: float, left: float, stretch: float) -> None:
        self.began = began
        self.left = left  # seconds that it would take alone
        self.stretch = stretch  # the process sleeps afterwards, for so many times what it took, less one
        self.until = began


class Cores:
    """Processor sharing. When a computation ends is foreseen as if nothing else began; what begins then puts it off."""

    __slots__ = ("_at", "_jobs", "_kind", "alone")

    def __init__(self, kind: Machine) -> None:
        self.alone = True  # one process has them all
        self._kind = kind
        self._jobs: dict[Node, _Job] = {}
        self._at = 0.0  # that `left` is true of

    def take(self, node: Node, begins: float, seconds: float, prolong: Prolong, stretch: float = 1.0) -> float:
        """Begin what takes so many seconds alone, or go on with that behind what the node does; how long it takes."""
        if self.alone:
            return seconds * stretch
        job = self._jobs.get(node)
        if job is not None and job.until > begins - HAIR_S:
            job.left += seconds
        else:
            self._advance(begins)
            job = self._jobs[node] = _Job(begins, seconds, stretch)
        self._foresee(node, prolong)
        return job.began + (job.until - job.began) * job.stretch - begins

    def forget(self, node: Node) -> None:
        """It is gone, and what it did with it. The others are told when the next begins: they are not slower for it."""
        self._jobs.pop(node, None)

    def clear(self) -> None:
        """Nothing runs any more."""
        self._jobs.clear()

    def _advance(self, now: float) -> None:
        while self._jobs and self._at < now:
            slowdown = self._kind.slowdown_of(len(self._jobs))
            shortest = min(job.left for job in self._jobs.values())
            until = min(now, self._at + shortest * slowdown)
            for node, job in list(self._jobs.items()):
                job.left -= (until - self._at) / slowdown
                if job.left <= HAIR_S:
                    del self._jobs[node]
            self._at = until
        self._at = max(self._at, now)

    def _foresee(self, beginner: Node, prolong: Prolong) -> None:
        """When each will be over, if it stays at these; those are put off that this changes."""
        at, done = self._at, 0.0
        by_length = sorted(self._jobs.items(), key=lambda item: item[1].left)
        for number, (node, job) in enumerate(by_length):
            at += (job.left - done) * self._kind.slowdown_of(len(by_length) - number)
            done = job.left
            if at > job.until + HAIR_S:
                job.until = at
                if node != beginner:
                    prolong(node, job.began + (at - job.began) * job.stretch)
