"""The replica's machine: ask for work, compute, exchange, report.

Without overlap the replica waits for an exchange; with overlap it computes the next gradient meanwhile, on the weights
that it has, and waits when the next exchange is due. Its exchanges are in `replica_exchanges`, the leases that it holds
in `held_work`, and what it tells the coordinator in `reports`.
"""

from __future__ import annotations

from squall.protocol.effects import Effect, End, MeetParts, Send
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
from squall.protocol.messages import (
    Cover,
    Dropped,
    Exchanged,
    Grant,
    Join,
    Logged,
    NonFinite,
    Skip,
    SkipNoted,
    Stop,
    Welcome,
)
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.nursery_messages import PartsPlaced
from squall.protocol.replica_exchanges import ReplicaExchanges
from squall.protocol.reports import Reports, ReportSums


class Replica:
    """Its state shows in what it has: without a clock it joins, with a batch it computes, else it waits."""

    __slots__ = (  # thousands are simulated at once, and more than 30 attributes would cost each a dictionary
        "_address", "_again", "_awaited", "_batch", "_computing_since", "_ended", "_epoch", "_exchanges", "_hand",
        "_in_rounds", "_poisoned", "_reports", "_retried", "_stepped", "_stopping", "_waiting_since", "cadence", "node",
        "pid",
    )  # fmt: skip

    wake_at: float | None = None

    def __init__(
        self, node: Node, shards: int, batch_size: int, exchanges: Exchanges, pid: int = 0, address: str = "",
        part: int = -1,
    ) -> None:  # fmt: skip
        """`address` is where its other parts call it, if they do; where they exchange by themselves it is `part` 0."""
        self.node = node
        self.cadence = exchanges.cadence
        self._in_rounds, self._awaited = exchanges.in_rounds, exchanges.awaited
        self.pid, self._address = pid, address
        self._hand = HeldWork(batch_size)
        self._exchanges = ReplicaExchanges(node, shards, exchanges.cadence, part)
        self._reports = Reports()
        self._batch: Batch | None = None  # under computation
        self._stepped = False  # the batch was pushed, and the loop may step on it again
        self._retried = False  # the batch gave NaN or Inf once
        self._again = False  # the batch is to be computed again, on weights that are being fetched
        self._epoch = 0  # of the newest batch
        self._computing_since = self._waiting_since = 0.0
        self._stopping = False
        self._poisoned = False  # the batch failed twice: the coordinator leaves it out or ends the run
        self._ended = False

    def on(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if type(event) is MessageArrived:  # most events are messages, and most of those are answers
            if type(event.message) is Exchanged:
                if self._exchanges.answered(event.sender.index, event.message):
                    self._on_answered(now, effects)
            else:
                self._on_message(event.message, now, effects)
            return effects
        match event:
            case GradientComputed():
                self._on_gradient(event, now, effects)
            case Started():
                effects.append(Send(COORDINATOR, Join(self.pid, self._address)))
            case BatchSkipped() if not self._stepped:
                self._skip(effects)
            case BatchOver() | BatchSkipped():
                self._batch, self._stepped, self._waiting_since = None, False, now
                self._proceed(now, effects)
            case LoopLeft():
                self._batch, self._stepped, self._stopping = None, False, True
                self._proceed(now, effects)
            case ValuesLogged(values):
                effects.append(Send(COORDINATOR, Logged(values, self._exchanges.weights(now))))
            case TimePassed():
                pass
            case _:
                raise AssertionError(f"{self.node} does not know {event!r}")
        return effects

    @property
    def held(self) -> bool:
        return True

    def awaits(self) -> Node:
        exchanges = self._exchanges
        answers = exchanges.must_wait or self._again or (exchanges.missing and not self._hand.empty)
        return exchanges.awaits() if answers else COORDINATOR

    def _on_message(self, message: Message, now: float, effects: list[Effect]) -> None:
        match message:
            case Grant():
                effects += self._hand.take(message, self._awaited)
                if message.steps:
                    self._exchanges.push_every = self._exchanges.fetch_every = message.steps
                self._proceed(now, effects)
            case Welcome(clock):
                self._exchanges.clock = clock
                self._exchange(now, effects, push=False, fetch=True)  # the first weights
                self._reports.tally = ReportSums()  # what every newcomer needs is not what the algorithm moves
            case SkipNoted():
                self._on_skipped(now, effects)
            case PartsPlaced(places):
                effects.append(MeetParts(places))
            case Stop():
                self._stopping = True
                self._proceed(now, effects)
            case _:
                raise AssertionError(f"{self.node} does not know {message!r}")

    # ------------------------------------------------------------ work

    def _proceed(self, now: float, effects: list[Effect]) -> None:
        """Do the next thing, if nothing is under way that must be waited for."""
        exchanges = self._exchanges
        if self._ended or exchanges.clock < 0:
            if self._stopping and not self._ended:
                self._leave(effects)
            return
        if self._poisoned and self._stopping:
            self._batch = None
        if self._batch is not None or exchanges.must_wait:
            return
        push, fetch = exchanges.push_due, exchanges.fetch_due
        if push or fetch:
            self._exchange(now, effects, push=push, fetch=fetch)
            if exchanges.must_wait:
                return
        if self._stopping:
            self._finish(now, effects)
        elif self._take_work(effects):
            self._compute(now, effects)
        elif exchanges.missing:
            return
        elif self._hand.idle:  # push nothing, so that the others are not held
            self._report(now, effects, at_once=True)
            self._exchange(now, effects, push=True, fetch=True)
        elif not self._hand.asked or self._hand.starved or self._in_rounds:
            if exchanges.since_push:  # let what is gathered so far be applied
                self._exchange(now, effects, push=True, fetch=True)
            else:
                self._report(now, effects, at_once=True)

    def _take_work(self, effects: list[Effect]) -> bool:
        """True when there is a batch to compute. Asks for the next lease while the last batch is computed."""
        ready = self._hand.ready(round_open=self._in_rounds and self._exchanges.since_push > 0)
        request = self._hand.request()
        if request is not None:
            effects.append(Send(COORDINATOR, request))
        return ready

    def _compute(self, now: float, effects: list[Effect]) -> None:
        exchanges = self._exchanges
        self._batch = batch = self._hand.cut()
        if batch.epoch != self._epoch:
            self._epoch = batch.epoch
            if exchanges.missing or exchanges.since_push:
                self._reports.epoch_ends(exchanges.clock + (exchanges.since_push > 0))
            else:
                self._report(now, effects, at_once=True)
        self._retried = False
        self._computing_since = now
        effects.append(exchanges.computation(batch))
        if self._waiting_since:
            self._reports.tally.wait_s += now - self._waiting_since
            self._waiting_since = 0.0

    def _on_gradient(self, event: GradientComputed, now: float, effects: list[Effect]) -> None:
        batch, exchanges = self._batch, self._exchanges
        assert batch is not None
        self._reports.tally.computed(event)
        self._waiting_since = now
        if not event.finite:
            self._on_non_finite(batch, event.spoilt, now, effects)
            return
        examples, gathered = batch.stop - batch.start, exchanges.gathered
        exchanges.computed(examples, self._computing_since + event.seconds)
        if self._stepped:  # the batch counts with its first step
            exchanges.gather(gathered.and_step(event.factors), further_step=True)
        else:
            cover = Cover(batch.lease, batch.stop)
            exchanges.gather(gathered.and_batch(cover, examples, event.loss, event.factors, event.extras))
            self._hand.spent(now - self._computing_since)
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
        """The coordinator knows: the batch has had its turn like any other, with nothing in the gradient."""
        batch, self._batch = self._batch, None
        if batch is not None:  # else it was told to stop meanwhile, and has given it up
            self._exchanges.gather(self._exchanges.gathered.and_none_of(Cover(batch.lease, batch.stop)))
            self._poisoned, self._waiting_since = False, now
            self._proceed(now, effects)

    def _on_non_finite(self, batch: Batch, spoilt: bool, now: float, effects: list[Effect]) -> None:
        """Try the batch once more, on fresh weights; after that the coordinator leaves it out, or ends the run."""
        final, spoilt = self._retried, spoilt or self._stepped
        effects.append(Send(COORDINATOR, NonFinite(batch.epoch, batch.start, batch.stop, batch.lease, final, spoilt)))
        if final:
            self._poisoned = True
            self._proceed(now, effects)  # Stop may have come before
            return
        self._retried = True
        if self.cadence.local:  # a fetch would undo what it has trained since the last one
            effects.append(self._exchanges.computation(batch))
            return
        self._again = True
        if not self._exchanges.missing:
            self._exchange(now, effects, push=False, fetch=True)

    # ------------------------------------------------------------ exchanges

    def _exchange(self, now: float, effects: list[Effect], *, push: bool, fetch: bool) -> None:
        self._exchanges.begin(effects, self._reports.tally, push=push, fetch=fetch)
        if push:
            self._hand.idle = False
        if not self._waiting_since:
            self._waiting_since = now

    def _on_answered(self, now: float, effects: list[Effect]) -> None:
        """All shards have answered."""
        answer = self._exchanges.finish(now, effects, self._reports.tally)
        if answer.behind:
            self._exchange(now, effects, push=False, fetch=True)
            self._reports.tally = ReportSums()
            return
        if answer.dropped:
            leases = [cover.lease for cover in answer.work.covers]
            effects.extend(Send(COORDINATOR, Dropped(lease)) for lease in leases)
            self._hand.drop(leases)
        else:
            self._reports.applied(answer.work)
        self._report(now, effects)
        if self._batch is None:
            self._proceed(now, effects)
        elif self._again and answer.fetched:
            self._again = False
            effects.append(self._exchanges.computation(self._batch))
        elif self._again:
            self._exchange(now, effects, push=False, fetch=True)

    # ------------------------------------------------------------ reports and the end

    def _report(self, now: float, effects: list[Effect], at_once: bool = False) -> None:
        progress = self._reports.due(self._exchanges.clock, now, at_once)
        if progress is not None:
            effects.append(Send(COORDINATOR, progress))

    def _finish(self, now: float, effects: list[Effect]) -> None:
        """Stop was asked: push what is gathered, wait for it, then leave."""
        if self._exchanges.missing:
            return
        spoilt = self._poisoned and self.cadence.local  # its own weights are what gave the NaN
        if self._exchanges.since_push and not self._in_rounds and not spoilt:
            self._exchange(now, effects, push=True, fetch=False)
        else:
            self._leave(effects)

    def _leave(self, effects: list[Effect]) -> None:
        self._ended = True
        effects.append(Send(COORDINATOR, self._reports.last(self._exchanges.clock)))
        effects.append(End("finished"))
