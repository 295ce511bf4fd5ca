"""The replica's machine: ask for work, compute, exchange, report.

One *exchange* is a push and/or a fetch with every shard. Without overlap the replica waits for it; with overlap it
computes the next gradient meanwhile, in a second gradient buffer and on the weights that it has, and waits at the
next exchange instead. Between exchanges it may move its own weights by local SGD.
"""

from __future__ import annotations

import math

from squall.protocol.effects import Compute, Effect, End, Expect, Payload, PreparePush, Send, UseWeights
from squall.protocol.events import (
    BatchOver,
    BatchSkipped,
    Event,
    GradientComputed,
    LoopLeft,
    MessageArrived,
    Started,
    TimePassed,
    ValuesLogged,
)
from squall.protocol.exchanges import Exchanges
from squall.protocol.frames import Message
from squall.protocol.held_work import Batch, HeldWork
from squall.protocol.in_flight import ExchangeInFlight
from squall.protocol.messages import (
    Cover,
    Dropped,
    Exchange,
    Exchanged,
    Grant,
    Join,
    LeaseRequest,
    Logged,
    NonFinite,
    Skip,
    SkipNoted,
    Stop,
    Weights,
    Welcome,
)
from squall.protocol.nodes import COORDINATOR, Node, shard_nodes
from squall.protocol.report_sums import NO_WORK, ReportSums
from squall.protocol.reports import Reports


class Replica:
    """Its state is implied: without a clock it joins, with a batch it computes, with answers missing it exchanges."""

    __slots__ = (  # thousands are simulated at once, and more than 30 attributes would cost each a dictionary
        "_active", "_again", "_awaited", "_basis", "_batch", "_computing_since", "_ended", "_epoch", "_fetch_every",
        "_flight", "_gathered", "_gradient", "_hand", "_held", "_held_at", "_in_rounds", "_paced_s", "_poisoned",
        "_push_every", "_reports", "_retried", "_since_fetch", "_since_push", "_stepped", "_steps", "_stopping",
        "_versions", "_waiting_since", "cadence", "clock", "node", "pid", "shards",
    )  # fmt: skip

    wake_at: float | None = None

    def __init__(self, node: Node, shards: int, batch_size: int, exchanges: Exchanges, pid: int = 0) -> None:
        self.node = node
        self.shards = shard_nodes(shards)
        self.cadence = cadence = exchanges.cadence
        self._in_rounds, self._awaited = exchanges.in_rounds, exchanges.awaited
        self.pid = pid
        self.clock: int | None = None  # exchanges done or under way; None before Welcome
        self._hand = HeldWork(batch_size)
        self._batch: Batch | None = None  # under computation
        self._stepped = False  # it was pushed, and may be stepped again
        self._retried = False  # it was not finite once
        self._again = False  # it is to be computed again, on weights to come
        self._push_every, self._fetch_every = cadence.push_every, cadence.fetch_every
        self._steps, self._paced_s = 0, 0.0  # batches since the last request for work, and how long they took
        self._computing_since = 0.0
        self._since_push = 0  # batches in the gradient buffer
        self._since_fetch = 0
        self._gathered = NO_WORK  # behind the gradient buffer
        self._flight = ExchangeInFlight()  # the exchange under way
        self._reports = Reports()
        self._gradient = 0  # buffer that gradients go to
        self._active = 0  # weights buffer that is computed on
        self._versions = [0] * shards  # of the active weights
        self._held, self._held_at = 0, math.inf  # examples behind them, with its own steps on them; since when
        self._basis = self._versions  # of the oldest batch in the gradient buffer
        self._stopping = False
        self._poisoned = False  # a batch failed twice: only Stop is waited for
        self._ended = False
        self._epoch = 0  # of the newest batch
        self._waiting_since = 0.0

    def on(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if type(event) is MessageArrived:  # most are, and most of an answer
            if type(event.message) is Exchanged:
                if self._flight.answered(event.sender.index, event.message):
                    self._on_answered(now, effects)
            else:
                self._on_message(event.message, now, effects)
            return effects
        match event:
            case GradientComputed():
                self._on_gradient(event, now, effects)
            case Started():
                effects.append(Send(COORDINATOR, Join(self.pid)))
            case BatchSkipped() if not self._stepped:
                self._skip(effects)
            case BatchOver() | BatchSkipped():
                self._batch, self._stepped, self._waiting_since = None, False, now
                self._proceed(now, effects)
            case LoopLeft():
                self._batch, self._stepped, self._stopping = None, False, True
                self._proceed(now, effects)
            case ValuesLogged(values):
                weights = Weights(min(self._versions), self._held, max(0.0, now - self._held_at))
                effects.append(Send(COORDINATOR, Logged(values, weights)))
            case TimePassed():
                pass
            case _:
                raise AssertionError(f"{self.node} does not know {event!r}")
        return effects

    def _on_message(self, message: Message, now: float, effects: list[Effect]) -> None:
        match message:
            case Grant():
                self._hand.take(message, self._awaited)
                if message.steps:
                    self._push_every = self._fetch_every = message.steps
                if message.lease is not None:
                    lease, size = message.lease, self._hand.batch_size
                    for start in range(lease.start, lease.stop, size):
                        effects.append(Expect(lease.epoch, start, min(start + size, lease.stop)))
                self._proceed(now, effects)
            case Welcome(clock):
                self.clock = clock
                self._exchange(now, effects, push=False, fetch=True)  # the first weights
                self._reports.tally = ReportSums()  # what every newcomer needs is not what the algorithm moves
            case SkipNoted():
                self._on_skipped(now, effects)
            case Stop():
                self._stopping = True
                self._proceed(now, effects)
            case _:
                raise AssertionError(f"{self.node} does not know {message!r}")

    # ------------------------------------------------------------ work

    def _proceed(self, now: float, effects: list[Effect]) -> None:
        """Do the next thing, if nothing is under way that must be waited for."""
        if self._ended or self.clock is None:
            if self._stopping and not self._ended:
                self._leave(effects)
            return
        if self._batch is not None or self._must_wait() or (self._poisoned and not self._stopping):
            return
        push, fetch = self._push_due(), self._fetch_due()
        if push or fetch:
            self._exchange(now, effects, push=push, fetch=fetch)
            if self._must_wait():
                return
        if self._stopping:
            self._finish(now, effects)
        elif self._take_work(effects):
            self._compute(now, effects)
        elif self._hand.idle:
            self._take_part(now, effects)
        elif not self._hand.asked or self._hand.starved or self._in_rounds:
            self._flush(now, effects)

    def _must_wait(self) -> bool:
        """An exchange is under way, and there is nothing to compute beside it."""
        if not self._flight.missing:
            return False
        return (
            not self.cadence.overlap or self._push_due() or self._fetch_due() or self._flight.fetching == self._active
        )

    def _take_work(self, effects: list[Effect]) -> bool:
        """True when there is a batch to compute. Asks for the next lease while the last batch is computed."""
        hand = self._hand
        round_open = self._in_rounds and self._since_push > 0
        ready = hand.ready(round_open)
        if hand.runs_out:
            current = ready or hand.idle or round_open
            assert self.clock is not None
            hand.asked = True
            step_s = self._paced_s / self._steps if self._steps else 0.0
            self._steps, self._paced_s = 0, 0.0
            effects.append(Send(COORDINATOR, LeaseRequest(self.clock + 1 + current, step_s)))
        return ready

    def _compute(self, now: float, effects: list[Effect]) -> None:
        self._batch = batch = self._hand.cut()
        if batch.epoch != self._epoch:
            self._epoch = batch.epoch
            assert self.clock is not None
            if self._flight.missing or self._since_push:
                self._reports.epoch_ends(self.clock + (self._since_push > 0))
            else:
                self._report(now, effects, at_once=True)
        self._retried = False
        self._computing_since = now
        effects.append(self._compute_effect(batch))
        if self._waiting_since:
            self._reports.tally.wait_s += now - self._waiting_since
            self._waiting_since = 0.0

    def _compute_effect(self, batch: Batch) -> Compute:
        if self._gathered.batches == 0:
            self._basis = self._versions
        fetches_next = self._since_fetch + 1 >= self._fetch_every
        return Compute(
            batch.epoch, batch.start, batch.stop, self._gradient,
            accumulate=self._gathered.batches > 0, local_step=not fetches_next,
        )  # fmt: skip

    def _on_gradient(self, event: GradientComputed, now: float, effects: list[Effect]) -> None:
        batch = self._batch
        assert batch is not None
        self._reports.tally.compute_s += event.seconds
        self._waiting_since = now
        if not event.finite:
            self._on_non_finite(batch, now, effects)
            return
        if self.cadence.local or self._since_fetch + 1 < self._fetch_every:
            self._held += batch.stop - batch.start
            self._held_at = self._computing_since + event.seconds
        self._since_push += 1
        self._since_fetch += 1
        if self._stepped:  # the batch counts with its first step
            self._basis = self._versions
            self._gathered = self._gathered.and_step(event.factors)
        else:
            cover, examples = Cover(batch.lease, batch.stop), batch.stop - batch.start
            self._gathered = self._gathered.and_batch(cover, examples, event.loss, event.factors, event.extras)
            self._steps += 1
            self._paced_s += now - self._computing_since
        if event.over:
            self._batch = None
            self._proceed(now, effects)
        else:
            self._stepped = True
            self._exchange(now, effects, push=True, fetch=True)

    def _skip(self, effects: list[Effect]) -> None:
        """Nothing else is done until the coordinator knows."""
        batch = self._batch
        assert batch is not None
        self._retried = False
        effects.append(Send(COORDINATOR, Skip(batch.lease, batch.epoch, batch.start, batch.stop)))

    def _on_skipped(self, now: float, effects: list[Effect]) -> None:
        """The batch has had its turn, for whoever counts or waits for batches."""
        batch, self._batch = self._batch, None
        assert batch is not None
        self._since_push += 1
        self._since_fetch += 1
        self._gathered = self._gathered.and_none_of(Cover(batch.lease, batch.stop))
        self._waiting_since = now
        self._proceed(now, effects)

    def _on_non_finite(self, batch: Batch, now: float, effects: list[Effect]) -> None:
        """Try the batch once more, on fresh weights; after that the coordinator ends the run."""
        notice = NonFinite(batch.epoch, batch.start, batch.stop, batch.lease, final=self._retried)
        effects.append(Send(COORDINATOR, notice))
        if self._retried:
            self._batch = None
            self._poisoned = True
            self._proceed(now, effects)  # Stop may have come before
            return
        self._retried = True
        if self.cadence.local:  # a fetch would undo what it has trained since the last one
            effects.append(self._compute_effect(batch))
            return
        self._again = True
        if not self._flight.missing:
            self._exchange(now, effects, push=False, fetch=True)

    # ------------------------------------------------------------ exchanges

    def _push_due(self) -> bool:
        return self._since_push >= self._push_every

    def _fetch_due(self) -> bool:
        return self._since_fetch >= self._fetch_every

    def _exchange(self, now: float, effects: list[Effect], *, push: bool, fetch: bool) -> None:
        assert not self._flight.missing
        assert self.clock is not None
        if push:
            self.clock += 1
            self._flight.work, self._gathered = self._gathered, NO_WORK
        fetching = -1
        if fetch:
            swaps = self.cadence.overlap and push
            fetching = 1 - self._active if swaps else self._active
            if push or self._fetch_due():  # what a batch is tried again on is beside the rhythm of pushes and fetches
                self._since_fetch = 0
        gradient = self._gradient if push else -1
        work = self._flight.work if push else NO_WORK
        self._flight.fetching = fetching
        if self.cadence.local and work.batches:
            effects.append(PreparePush(gradient))
        for shard, basis in zip(self.shards, self._basis):
            exchange = Exchange(
                self.clock, gradient, fetching, basis, work.examples, work.covers, work.batches, work.factors
            )
            payload = Payload("gradient", self.node, gradient, self.clock, shard.index) if push else None
            effects.append(Send(shard, exchange, payload))
        self._flight.begin(len(self.shards))
        tally = self._reports.tally
        tally.exchanges += 1
        tally.pushes += work.batches > 0
        tally.fetches += fetch
        if push:
            self._since_push = 0
            self._hand.idle = False
            if self.cadence.overlap:
                self._gradient = 1 - self._gradient
        if not self._waiting_since:
            self._waiting_since = now

    def _on_answered(self, now: float, effects: list[Effect]) -> None:
        """All shards have answered. A newcomer learns where the others are."""
        assert self.clock is not None
        flight, reports = self._flight, self._reports
        answers = flight.answers(reports.tally.staleness)
        self.clock = max(self.clock, answers.last)
        fetched = flight.fetching >= 0
        if fetched:
            self._versions = answers.versions
            self._held, self._held_at = answers.examples, now
            self._active, flight.fetching = flight.fetching, -1
            effects.append(UseWeights(self._active))
        if answers.first < self.clock:  # shards have let it in at different clocks: some of the weights are older
            self._exchange(now, effects, push=False, fetch=True)
            reports.tally = ReportSums()
            return
        if answers.dropped:
            leases = [cover.lease for cover in flight.work.covers]
            effects.extend(Send(COORDINATOR, Dropped(lease)) for lease in leases)
            self._hand.drop(leases)
        else:
            reports.applied(flight.work)
        flight.work = NO_WORK
        self._report(now, effects)
        if self._batch is None:
            self._proceed(now, effects)
        elif self._again and fetched:
            self._again = False
            effects.append(self._compute_effect(self._batch))
        elif self._again:
            self._exchange(now, effects, push=False, fetch=True)

    def _take_part(self, now: float, effects: list[Effect]) -> None:
        """An exchange without a batch for this replica: push nothing, so that the others are not held."""
        if self._flight.missing:
            return
        self._report(now, effects, at_once=True)
        self._exchange(now, effects, push=True, fetch=True)

    def _flush(self, now: float, effects: list[Effect]) -> None:
        """Nothing to compute: let what is gathered so far be applied, and everything done be known."""
        if self._flight.missing:
            return
        if self._since_push:
            self._exchange(now, effects, push=True, fetch=True)
        else:
            self._report(now, effects, at_once=True)

    # ------------------------------------------------------------ reports and the end

    def _report(self, now: float, effects: list[Effect], at_once: bool = False) -> None:
        assert self.clock is not None
        progress = self._reports.due(self.clock, now, at_once)
        if progress is not None:
            effects.append(Send(COORDINATOR, progress))

    def _finish(self, now: float, effects: list[Effect]) -> None:
        """Stop was asked: push what is gathered, wait for it, then leave."""
        if self._flight.missing:
            return
        spoilt = self._poisoned and self.cadence.local  # its own weights are what gave the NaN
        if self._since_push and not self._in_rounds and not spoilt:
            self._exchange(now, effects, push=True, fetch=False)
        else:
            self._leave(effects)

    def _leave(self, effects: list[Effect]) -> None:
        self._ended = True
        effects.append(Send(COORDINATOR, self._reports.last()))
        effects.append(End("finished"))
