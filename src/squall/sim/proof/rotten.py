"""Batches that give NaN whoever computes them, and whether they are left out as the user allows."""

from __future__ import annotations

import random
from collections import Counter

from squall.protocol.effects import Compute, End, PublishSnapshot
from squall.protocol.events import GradientComputed
from squall.protocol.leases import Limits
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.notes import BatchLeftOut
from squall.sim.proof.broken import Broken
from squall.sim.proof.faults import Fault, Rot
from squall.sim.proof.memory import BatchRange
from squall.sim.proof.positions import restored, trained
from squall.strategies.base import Recipe
from squall.strategies.work import Loop

ROTS = 0.3  # of the worlds have such batches


def rots(seed: int, events: int) -> tuple[Fault, ...]:
    chance = random.Random(f"{seed} rots")  # of its own: all else of a seed's world stays as it was
    return tuple(Rot(chance.randrange(events)) for _ in range(chance.randint(1, 3) if chance.random() < ROTS else 0))


def allowed(seed: int, recipe: Recipe) -> int:
    """Batches of an epoch that may be left out."""
    return random.Random(f"{seed} quarantine").choice((0, 0, 1, 2, 3)) if isinstance(recipe.work, Loop) else 0


class Rotten:
    """The batches of a run that are rotten, until a user mends them, and what machines make of them."""

    def __init__(self, at_most: int) -> None:
        self.at_most = at_most  # of an epoch
        self.coming = 0  # the next batches that are computed will be
        self.happened = False  # one has been
        self._batches: set[BatchRange] = set()
        self._failed: Counter[tuple[Node, BatchRange]] = Counter()  # by process, in a row
        self._at: dict[Node, BatchRange] = {}  # that is computed
        self._stepped: dict[Node, BatchRange] = {}  # that weights have come through a step on, of several
        self._hopeless = False  # such a batch has failed twice
        self._twice: set[BatchRange] = set()  # others that have
        self._left_out: set[BatchRange] = set()  # in this life, or in the snapshot that it goes on from

    def begin(self, saved: PublishSnapshot | None, size: int, limits: Limits) -> None:
        """A life begins; of what was left out before it, what its snapshot does not count as over is dealt again."""
        self._failed.clear()
        self._at.clear()
        self._stepped.clear()
        self._left_out &= trained(restored(saved, size, limits), size) if saved is not None and self.at_most else set()

    def spoils(self, batch: BatchRange) -> bool:
        """Whether a computation on it gives NaN."""
        if self.coming:
            self.coming -= 1
            self.happened = True
            self._batches.add(batch)
        return batch in self._batches

    def watch(self, node: Node, what: object) -> None:
        """Raise `Broken` where a batch is left out that should not be, or ends the run and should not."""
        match what:
            case Compute(epoch, start, stop):
                if self._at.get(node) != (epoch, start, stop):
                    self._failed[node, (epoch, start, stop)] = 0
                    self._stepped.pop(node, None)
                self._at[node] = (epoch, start, stop)
            case GradientComputed(finite=False):
                batch = self._at[node]
                self._failed[node, batch] += 1
                if self._failed[node, batch] > 1 and self._stepped.get(node) == batch:
                    self._hopeless = True
                elif self._failed[node, batch] > 1:
                    self._twice.add(batch)
            case GradientComputed(over=False):
                self._stepped[node] = self._at[node]
            case BatchLeftOut(_, skip, nonfinite=True):
                self._check(skip.epoch, skip.start, skip.stop)
            case End("nonfinite") if node == COORDINATOR:
                self._batches, self.coming = set(), 0
                counts = Counter(epoch for epoch, _, _ in self._twice | self._left_out)
                if self.at_most and max(counts.values(), default=0) <= self.at_most and not self._hopeless:
                    raise Broken("I21", f"the run ends, and {self.at_most} of an epoch may be left out: {self._twice}")

    def _check(self, *batch: int) -> None:
        epoch, start, stop = batch
        if (epoch, start, stop) not in self._twice:
            raise Broken("I21", f"{batch} is left out, and no process had NaN of it twice")
        self._left_out.add((epoch, start, stop))
        if sum(other == epoch for other, _, _ in self._left_out) > self.at_most:
            raise Broken("I21", f"{self._left_out} are left out, and {self.at_most} of an epoch may be")
