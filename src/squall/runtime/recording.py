"""Hosts that keep a schedule of what they carry out. See `runtime.schedule` for the file."""

from __future__ import annotations

from squall.protocol.core import (
    Apply,
    Compute,
    Effect,
    End,
    Event,
    GradientComputed,
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
from squall.runtime.schedule import APPLIED, COMPUTED, CONTINUED, DELIVERED, PUSHED, SAVED, USED, Log


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
    """A shard writes each record before its peers can know of what it tells."""

    def __init__(self, host: ShardHost, log: Log, replicas: int) -> None:
        self._host = host
        self._log = log
        self._replicas = replicas
        self._fingerprint = Fingerprint(host.store.weights)
        self.poll = host.poll

    def perform(self, effect: Effect, now: float) -> Event | None:
        event = self._host.perform(effect, now)
        match effect:
            case Apply(terms, share, clock, rate):
                record = [APPLIED, self._fingerprint(), short(share), short(rate), clock - terms[0].clock]
                for term in terms:
                    record += (self._who(term.owner), term.buffer, term.clock, short(term.weight))
                self._log.add(tuple(record))
            case WriteSnapshot(number, version):
                self._log.add((SAVED, number, version))
            case End():
                self._log.close()
        return event

    def attach(self, payload: Payload) -> None:
        self._host.attach(payload)
        if payload.owner.role == "replica":
            self._log.add((DELIVERED, self._who(payload.owner), payload.buffer))

    def _who(self, node: Node) -> int:
        return node.index + self._replicas * node.incarnation


class RecordedReplica:
    """Batches are written with the push that they are behind: without one they have changed nothing that lasts."""

    def __init__(self, host: Host, log: Log) -> None:
        self._host = host
        self._log = log
        self._clock = 0  # of the last push; the first is 1
        self._prepared = False
        self._count = 0  # batches not yet written: of the same flags and length, one behind the other
        self._flags = self._epoch = self._start = self._length = 0
        self._stop = -1  # where the last batch ended
        self._known: tuple[int, int, int] | None = None  # epoch, stop, length of the last batch that is written
        self.poll = host.poll

    def perform(self, effect: Effect, now: float) -> Event | None:
        event = self._host.perform(effect, now)
        match effect:
            case Compute():
                assert isinstance(event, GradientComputed)
                self._computed(effect, event.finite)
            case PreparePush():
                self._prepared = True
            case UseWeights(buffer):
                self._write_batches()
                self._log.add((USED, buffer))
            case End():
                self._write_batches()
                self._log.close()
        return event

    def attach(self, payload: Payload) -> None:
        """Called for each shard; the push is one."""
        self._host.attach(payload)
        if payload.clock == self._clock:
            return
        self._clock = payload.clock
        self._write_batches()
        push = (PUSHED, payload.clock, payload.buffer)
        self._log.add((*push, 1) if self._prepared else push)
        self._prepared = False

    def _computed(self, batch: Compute, finite: bool) -> None:
        bits, length = flags(batch, finite), batch.stop - batch.start
        follows = batch.start == self._stop and batch.epoch == self._epoch and length == self._length
        if not (self._count and follows and bits == self._flags):
            self._write_batches()
            self._flags, self._epoch, self._start, self._length = bits, batch.epoch, batch.start, length
        self._stop = batch.stop
        self._count += 1
        if not finite:
            self._write_batches()

    def _write_batches(self) -> None:
        count = self._count
        if not count:
            return
        self._count = 0
        if self._known == (self._epoch, self._start, self._length):
            self._log.add((CONTINUED, self._flags, count))
        else:
            self._log.add((COMPUTED, self._flags, self._epoch, self._start, self._length, count))
        self._known = (self._epoch, self._stop, self._length)
