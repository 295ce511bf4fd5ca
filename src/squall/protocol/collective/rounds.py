"""The rounds of a group: which batches each holds, who has finished it, and which count as trained."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import astuple

from squall.protocol.leases import Leases
from squall.protocol.machine import Refusal
from squall.protocol.messages import Lease, Skip, Stats
from squall.protocol.nodes import Node

AHEAD = 2  # rounds that are dealt at most before the first of them counts: replicas need not wait for the next
LOADED = 3  # alike, beside one for each loader: a replica hears of those that were dealt before the step before last


class Round(NamedTuple):
    """What was dealt in it, to whom, and what those have told who have finished it."""

    dealt: dict[Node, Lease | None]
    told: dict[Node, Stats]
    left_out: dict[Node, None]  # scripts that train nothing on what they were dealt

    @property
    def examples(self) -> int:
        return sum(map(_size, self.dealt.values()))

    def stats(self, node: Node) -> Stats:
        """What the node has done of it, also where it did not live to tell."""
        lease = self.dealt[node] if node not in self.left_out else None
        return self.told.get(node, Stats(_size(lease), int(lease is not None), loss_sum=math.nan))


def _size(lease: Lease | None) -> int:
    return 0 if lease is None else lease.stop - lease.start


class Rounds:
    """A round counts when every live member has finished it: whoever of them survives then has it.

    While all go on, nobody finishes a round before all have finished the one before. Of the round that a death
    interrupts, some survivors may have finished it and others not; it counts if one has (`settle`), who gives the
    others his weights.
    """

    def __init__(self, leases: Leases, clock: int) -> None:
        self.leases, self.first = leases, clock  # `first`: with which each begins
        self.counted = clock  # the newest round that counts
        self.open: dict[int, Round] = {}  # dealt and not counted, the oldest first
        self.dealt_ever = clock  # the newest round that was dealt, though it may have been taken back
        self.base = clock  # the round from which the newest group has gone on
        self._finished: dict[Node, int] = {}  # live member -> the newest round that it has finished
        self.doubted: dict[Node, None] = {}  # members that have said more than can be

    @property
    def dealt(self) -> int:
        """The newest round that was dealt."""
        return self.counted + len(self.open)

    @property
    def newest(self) -> int:
        """The newest round that a live member has finished; -1 where nobody is live."""
        return max(self._finished.values(), default=-1)

    def finished(self, node: Node, clock: int) -> None:
        """It says that it has come so far. Raises `Refusal` where it cannot say so."""
        most = self.dealt_ever if node in self._finished else self.first
        if not self.clock_of(node) <= clock <= most:
            raise Refusal(f"it has finished round {clock}, behind {self.clock_of(node)}, and {most} is the newest")
        self._finished[node] = -1 if node in self.doubted and clock > self.base else clock

    def doubt(self, group: Iterable[Node]) -> None:
        """Hold against each other what all members of the newest group have said.

        A round needs the gradients of all, so nobody is two rounds ahead of another one, and of none of them it is
        believed that it has fallen behind the group's base. What is said beyond counts for nothing, and its rounds are
        dealt again; it may be the other one who lies, so that nobody is refused.
        """
        said = {node: self._finished[node] for node in group if node in self._finished and node not in self.doubted}
        most = max(self.base, min(said.values(), default=self.base)) + 1
        for node in [node for node, clock in said.items() if clock > most]:
            self._finished[node], self.doubted[node] = -1, None

    def told(self, node: Node, clock: int, stats: Stats) -> None:
        """It has finished this round, and tells what it did, which counts with the round. Raises `Refusal`."""
        expected = max(self.clock_of(node), self.base) + 1
        if clock != expected or clock > self.dealt:
            raise Refusal(f"it has finished round {clock}, and was to do {expected}")
        self.doubted.pop(node, None)
        self.finished(node, clock)
        if clock in self.open:
            self.open[clock].told[node] = stats

    def leaves_out(self, node: Node, skip: Skip) -> None:
        """Its script trains nothing on what it was dealt. Raises `Refusal` where that is something else."""
        lease = Lease(*astuple(skip))
        each = next((each for each in self.open.values() if each.dealt.get(node) == lease), None)
        if each is None or node in each.left_out:
            raise Refusal(f"it leaves out {skip}, which it was not dealt")
        each.left_out[node] = None

    def forget(self, node: Node) -> None:
        self._finished.pop(node, None)
        self.doubted.pop(node, None)

    def clock_of(self, node: Node) -> int:
        """-1: it has not told."""
        return self._finished.get(node, -1)

    def deal(self, members: Iterable[Node], now: float) -> Round | None:
        """A batch for each member, of one epoch; None for those that get none. None: nothing is left to deal."""
        dealt: dict[Node, Lease | None] = {}
        epoch = None
        for node in sorted(members):
            lease = self.leases.take(node, 1, now, within_epoch=epoch) if len(dealt) == 0 or epoch is not None else None
            epoch = lease.epoch if lease is not None else None
            dealt[node] = lease
        if not any(dealt.values()):
            return None
        each = self.open[self.dealt + 1] = Round(dealt, {}, {})
        self.dealt_ever = max(self.dealt_ever, self.dealt)
        return each

    def count(self) -> list[Round]:
        """The rounds that every live member has finished by now."""
        first = self.open.get(self.counted + 1)
        if first is None or len(first.told) < len(self._finished):
            return []  # soon said, of many members
        return self._count_upto(min(self._finished.values(), default=self.counted))

    def settle(self) -> list[Round]:
        """The rounds that a survivor has finished. Take the others back before dealing again (`give_back`)."""
        return self._count_upto(self.newest)

    def give_back(self) -> list[Lease]:
        """All that was dealt and does not count."""
        leases = [lease for each in self.open.values() for lease in each.dealt.values() if lease is not None]
        self.open.clear()
        return leases

    def _count_upto(self, clock: int) -> list[Round]:
        counted = []
        while self.open and self.counted < clock:
            self.counted += 1
            counted.append(self.open.pop(self.counted))
        return counted
