"""Hosts that keep a schedule of what they carry out. See `runtime.schedule` for the file."""

from __future__ import annotations

from squall.protocol.core import (
    Apply,
    Compute,
    Effect,
    End,
    Event,
    Node,
    Payload,
    PreparePush,
    UseWeights,
    WriteSnapshot,
)
from squall.runtime.driver import Host
from squall.runtime.hosts import ShardHost
from squall.runtime.job import Job
from squall.runtime.records import Fingerprint, flags, short
from squall.runtime.schedule import APPLIED, COMPUTED, CONTINUED, DELIVERED, PREPARED, PUSHED, SAVED, SKIPPED, USED, Log


def recorded(host: Host, job: Job, node: Node) -> Host:
    """The host, with its schedule kept, where the run keeps one."""
    if job.schedule is None:
        return host
    log = Log(job.schedule / str(node))
    if node.role == "replica":
        return RecordedReplica(host, log)
    assert isinstance(host, ShardHost)
    return RecordedShard(host, log, job.recipe.replicas)


class RecordedShard:
    """What a shard did is written when its answer has left and it would only wait (`write`), or before its next update.

    Should it be killed before that, nobody goes on from what is missing: without a shard a run ends.
    """

    def __init__(self, host: ShardHost, log: Log, replicas: int) -> None:
        self._host = host
        self._log = log
        self._replicas = replicas
        self._fingerprint = Fingerprint(host.store.weights)
        self._update: Apply | None = None  # not written yet
        self._sent: list[Payload] = []  # since then
        self.poll = host.poll

    def perform(self, effect: Effect, now: float) -> Event | None:
        self.write()
        event = self._host.perform(effect, now)
        if type(effect) is Apply:
            self._update = effect
        elif type(effect) is WriteSnapshot:
            self._log.add([SAVED, effect.number, effect.version])
        elif type(effect) is End:
            self._log.close()
        return event

    def attach(self, payload: Payload) -> None:
        self._host.attach(payload)
        self._sent.append(payload)

    def write(self) -> None:
        """Bring the schedule up to date."""
        update, sent = self._update, self._sent
        record: list[object] = []
        if update is not None:
            self._update = None
            terms, clock = update.terms, update.terms[0].clock
            record += (APPLIED, self._fingerprint(), short(update.share), short(update.rate), len(terms))
            for term in terms:
                record += (self._who(term.owner), term.buffer, term.clock, short(term.weight))
            record.append(update.clock - clock)
        if sent:
            self._sent = []
            for payload in sent:
                if payload.owner.role == "replica":  # an evaluator only looks
                    record += (DELIVERED, self._who(payload.owner), payload.buffer)
        if record:
            self._log.add(record)

    def _who(self, node: Node) -> int:
        return node.index + self._replicas * node.incarnation


class RecordedReplica:
    """What a replica did is written before it pushes: without a push it has changed nothing that lasts."""

    def __init__(self, host: Host, log: Log) -> None:
        self._host = host
        self._log = log
        self._record: list[object] = []  # not written yet
        self._clock = 0  # of the last push; the first is 1
        self._push = PUSHED  # the next one's tag
        self._count = 0  # batches not in the record yet: alike, one behind the other
        self._flags = self._epoch = self._start = self._length = 0
        self._stop = -1  # where the last batch ended
        self._known = (-1, 0, 0)  # epoch, length and end of the last batch in the record
        self.poll = host.poll

    def perform(self, effect: Effect, now: float) -> Event | None:
        event = self._host.perform(effect, now)
        kind = type(effect)
        if kind is Compute:
            self._computed(effect, event.finite)  # type: ignore[arg-type,union-attr]
        elif kind is UseWeights:
            self._close_batches()
            self._record += (USED, effect.buffer)  # type: ignore[attr-defined]
        elif kind is PreparePush:
            self._push = PREPARED
        elif kind is End:
            self._write()
            self._log.close()
        return event

    def attach(self, payload: Payload) -> None:
        """Called for each shard; the push is one."""
        self._host.attach(payload)
        clock = payload.clock
        if clock != self._clock:
            self._clock = clock
            self._close_batches()
            self._record += (self._push, clock, payload.buffer)
            self._push = PUSHED
            self._write()

    def _computed(self, batch: Compute, finite: bool) -> None:
        bits, start, epoch = flags(batch, finite), batch.start, batch.epoch
        length = batch.stop - start
        alike = bits == self._flags and start == self._stop and epoch == self._epoch and length == self._length
        if not (alike and self._count):
            self._close_batches()
            self._flags, self._epoch, self._start, self._length = bits, epoch, start, length
        self._stop = batch.stop
        self._count += 1
        if not finite:
            self._write()

    def _close_batches(self) -> None:
        count = self._count
        if not count:
            return
        self._count = 0
        epoch, length, stop = self._known
        skipped = self._start - stop
        if epoch != self._epoch or length != self._length or skipped < 0:
            self._record += (COMPUTED, self._flags, count, self._epoch, self._start, self._length)
        elif skipped:
            self._record += (SKIPPED, self._flags, count, skipped)
        else:
            self._record += (CONTINUED, self._flags, count)
        self._known = (self._epoch, self._length, self._stop)

    def _write(self) -> None:
        self._close_batches()
        if self._record:
            self._log.add(self._record)
            self._record = []
