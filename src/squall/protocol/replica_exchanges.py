"""A replica's exchanges: what it has gathered since its last push, when it is time to exchange, and what comes back.

An exchange is a push and/or a fetch with every shard, one at a time. With overlap there are two buffers of gradients
and two of weights, so that the next gradient is computed while the last one is exchanged.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

from squall.protocol.effects import Compute, Effect, Payload, PreparePush, Send, UseWeights
from squall.protocol.exchanges import Cadence
from squall.protocol.held_work import Batch
from squall.protocol.machine import Refusal
from squall.protocol.messages import Exchange, Exchanged, Weights
from squall.protocol.nodes import Node, shard_nodes
from squall.protocol.pushed_work import NO_WORK, PushedWork
from squall.protocol.reports import ReportSums


class Answer(NamedTuple):
    """What all shards together have answered."""

    behind: bool  # a shard has let a newcomer in at an earlier clock than another: some of its weights are older
    dropped: bool  # a shard had closed the push's round already
    fetched: bool
    work: PushedWork  # that was pushed


class ReplicaExchanges:
    __slots__ = (
        "_active", "_answers", "_basis", "_cadence", "_fetching", "_gradient", "_node", "_part", "_shards", "_versions",
        "clock", "examples", "fetch_every", "gathered", "missing", "push_every", "pushed", "since", "since_fetch",
        "since_push",
    )  # fmt: skip

    def __init__(self, node: Node, shards: int, cadence: Cadence, part: int) -> None:
        self._node, self._shards, self._part = node, shard_nodes(shards), part
        self._cadence = cadence
        self.push_every, self.fetch_every = cadence.push_every, cadence.fetch_every
        self.clock = -1  # exchanges done or under way; -1 before Welcome
        self.since_push = self.since_fetch = 0  # batches
        self.gathered = NO_WORK  # what the gradient buffer holds
        self._gradient = 0  # buffer that gradients go to
        self._active = 0  # weights buffer that is computed on
        self._versions = [0] * shards  # of the active weights
        self._basis = self._versions  # of the weights that the oldest gradient in the buffer was computed on
        self.examples = 0  # behind the active weights, those of the replica's own steps on them included
        self.since = math.inf  # when the active weights were fetched, or moved by the replica's newest step
        self.missing = 0  # answers to come
        self.pushed = NO_WORK  # with the exchange under way
        self._fetching = -1  # weights buffer that the exchange under way fills; -1: it fetches nothing
        self._answers: list[Exchanged | None] = []  # of each shard

    @property
    def push_due(self) -> bool:
        return self.since_push >= self.push_every

    @property
    def fetch_due(self) -> bool:
        return self.since_fetch >= self.fetch_every

    @property
    def must_wait(self) -> bool:
        """An exchange is under way, and there is nothing to compute beside it."""
        if not self.missing:
            return False
        return not self._cadence.overlap or self.push_due or self.fetch_due or self._fetching == self._active

    def awaits(self) -> Node:
        """A shard that has not answered."""
        return next(shard for shard, answer in zip(self._shards, self._answers) if answer is None)

    # ------------------------------------------------------------ what is gathered

    def computation(self, batch: Batch) -> Compute:
        """How to compute a batch, so that its gradient is gathered with those before it."""
        if self.gathered.batches == 0:
            self._basis = self._versions
        return Compute(
            batch.epoch, batch.start, batch.stop, self._gradient,
            accumulate=self.gathered.batches > 0, local_step=self.since_fetch + 1 < self.fetch_every,
        )  # fmt: skip

    def gather(self, work: PushedWork, *, further_step: bool = False) -> None:
        """Another batch has had its turn, and `work` is what is gathered now."""
        self.since_push += 1
        self.since_fetch += 1
        self.gathered = work
        if further_step:
            self._basis = self._versions

    def computed(self, examples: int, at: float) -> None:
        """A gradient was computed. Where the replica moves its own weights between fetches, it has moved them by it."""
        if self._cadence.local or self.since_fetch + 1 < self.fetch_every:
            self.examples += examples
            self.since = at

    def weights(self, now: float) -> Weights:
        """The weights that the replica computes on."""
        return Weights(min(self._versions), self.examples, max(0.0, now - self.since))

    # ------------------------------------------------------------ exchanging

    def begin(self, effects: list[Effect], tally: ReportSums, *, push: bool, fetch: bool) -> None:
        assert not self.missing
        gradient, work = -1, NO_WORK
        if push:
            self.clock += 1
            gradient, self.pushed = self._gradient, self.gathered
            work, self.gathered = self.gathered, NO_WORK
        self._fetching = -1
        if fetch:
            self._fetching = 1 - self._active if self._cadence.overlap and push else self._active
            if push or self.fetch_due:  # a fetch for a batch that is tried again does not shift the later ones
                self.since_fetch = 0
        if self._cadence.local and work.batches:
            effects.append(PreparePush(gradient))
        for shard, basis in zip(self._shards, self._basis):
            exchange = Exchange(
                self.clock, gradient, self._fetching, basis, work.examples, work.covers, work.batches, work.factors
            )
            payload = None
            if work.batches:
                payload = Payload("gradient", self._node, gradient, self.clock, shard.index, part=self._part)
            effects.append(Send(shard, exchange, payload))
        self._answers, self.missing = [None] * len(self._shards), len(self._shards)
        tally.exchanges += 1
        tally.pushes += work.batches > 0
        tally.fetches += fetch
        if push:
            self.since_push = 0
            if self._cadence.overlap:
                self._gradient = 1 - self._gradient

    def answered(self, shard: int, message: Exchanged) -> bool:
        """True when all have answered: answers are looked at together, as thousands of replicas are simulated."""
        if not self.missing or self._answers[shard] is not None:
            raise Refusal("it answers, and nothing was asked")
        self._answers[shard] = message
        self.missing -= 1
        return not self.missing

    def finish(self, now: float, effects: list[Effect], tally: ReportSums) -> Answer:
        """Carry out what all answers together say. A newcomer learns at which clock the others are."""
        clocks, versions, dropped, examples = [], [], False, sys.maxsize
        for answer in self._answers:
            assert answer is not None
            clocks.append(answer.clock)
            versions.append(answer.version)
            dropped |= answer.dropped
            examples = min(examples, answer.examples)
            if answer.staleness >= 0:
                tally.staleness.append(answer.staleness)
        self._answers = []
        self.clock = max(self.clock, *clocks)
        fetched = self._fetching >= 0
        if fetched:
            self._versions = versions
            self.examples, self.since = examples, now
            self._active, self._fetching = self._fetching, -1
            effects.append(UseWeights(self._active))
        behind, work = min(clocks) < self.clock, self.pushed
        if not behind:
            self.pushed = NO_WORK
        return Answer(behind, dropped, fetched, work)
