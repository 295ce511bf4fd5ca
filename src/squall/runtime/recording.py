"""Hosts that keep a schedule of what they carry out. See `runtime.schedule` for the file."""

from __future__ import annotations

import math
from typing import Any

from squall.protocol.copied import Attach, CopyMore, CopyTo
from squall.protocol.effects import (
    AddPortions,
    Apply,
    CalculateVectors,
    Compute,
    Effect,
    End,
    Keep,
    Payload,
    PreparePush,
    Transmit,
    UseWeights,
    WriteSnapshot,
)
from squall.protocol.events import Event, GradientComputed, SnapshotWritten
from squall.protocol.nodes import Node
from squall.protocol.unsaved import GoBack
from squall.runtime import schedule
from squall.runtime.collective.host import CollectiveHost
from squall.runtime.collective.process import GroupedMember
from squall.runtime.collective.recording import RecordedMember, looked_at
from squall.runtime.driver import Host, HostAround
from squall.runtime.hosts import ShardHost
from squall.runtime.job import Job
from squall.runtime.journal import Journal
from squall.runtime.legacy import Legacy
from squall.runtime.records import SEEN, UNSEEN, ClockSteps, Fingerprint, short
from squall.runtime.replay_keeping import ReplicaParts, ShardCuts
from squall.runtime.schedule import ScheduleWriter
from squall.runtime.store import Store
from squall.runtime.vectors import VectorHost
from squall.strategies.work import Collective

WRITTEN_TOGETHER = 64  # updates and answers of a shard, at most
WRITTEN_EVERY_S = 0.1  # unless they are fewer: by the node's own clock

Moving = Apply | CalculateVectors  # they have a fingerprint
Changed = Moving | GoBack | AddPortions


def recorded(host: Host, job: Job, node: Node) -> Host:
    """The host, with its schedule kept, where the run keeps one, and it is not that of a part (`recorded_row`)."""
    if job.schedule is None or (isinstance(host, CollectiveHost) and job.inside is not None):
        return host
    last, goes_on = job.plan.settings.last_snapshots, job.succeeds(node)
    legacy = job.legacies.get(node.index) if node.role == "shard" else None
    if goes_on and (last or (legacy is not None and legacy.backed)):
        return host  # what a replay from a snapshot needs beside it the dead one has not kept: it ends there
    log = ScheduleWriter(job.schedule / str(node), _may_take(job, node), goes_on)
    if isinstance(host, CollectiveHost):
        member = host.in_group
        assert isinstance(member, GroupedMember)
        return RecordedMember(host, member.member.vector, log, lambda: member.unused)
    if node.role == "replica":
        return RecordedReplica(host, log, ReplicaParts(job, node) if last else None)
    assert isinstance(host, ShardHost | VectorHost)
    cuts = ShardCuts(job, node, host.store, last) if last and isinstance(host.store, Store) else None
    return RecordedShard(host, log, job.recipe.replicas, cuts, legacy)


def recorded_row(host: Host, job: Job, node: Node) -> Host:
    """The host of all parts of a member of all-reduce. It is done when they all are, which one of them is not."""
    if job.schedule is None or not isinstance(job.recipe.work, Collective):
        return host
    assert job.own is not None
    log = ScheduleWriter(job.schedule / str(node), _may_take(job, node))
    return RecordedMember(host, looked_at(job.own, job.inside), log, lambda: False)


def _may_take(job: Job, node: Node) -> float:
    """Bytes. A shard has ten times as much to say of an update as the replica that made it."""
    gigabytes = job.plan.settings.keep_schedule
    if gigabytes is None or isinstance(gigabytes, str):
        return math.inf
    shards, replicas = job.recipe.shards, job.recipe.replicas
    share = 0.9 / shards if node.role == "shard" else (0.1 if shards else 1.0) / replicas
    return 1e9 * gigabytes * share


class RecordedShard(HostAround):
    """Records a shard. It takes an update's fingerprint once the answer has left (`rest`), or before the next update.

    Updates are written several at a time. Those that a killed shard has not written its successor writes, which knows
    them from the journal; the fingerprints nobody has taken. Where the death ends the run they are not missed: a resume
    begins at a snapshot from before them.
    """

    def __init__(
        self, host: ShardHost | VectorHost, log: ScheduleWriter, replicas: int, cuts: ShardCuts | None = None,
        legacy: Legacy | None = None,
    ) -> None:  # fmt: skip
        super().__init__(host)
        self._log = log
        self._cuts = cuts
        self._replicas = replicas
        self._fingerprint = Fingerprint(host.store.weights, 0 if legacy is None else legacy.numbers.updates)
        self._clocks = ClockSteps()
        self._done: list[Changed | Payload] = []  # updates made, and weights sent, not written yet
        self._seen: list[int] = []  # the fingerprints behind those updates
        self._unseen = False  # the last one's is not taken yet
        self._now = self._written_at = 0.0
        self._journal = None if legacy is None else legacy.journal
        if self._journal is not None:
            self._journal.before_cut = self.write
            self._go_on(self._journal)

    def _go_on(self, journal: Journal) -> None:
        """Write what the process before this one has done and not written."""
        done = [what for effect, _ in journal.carried_out if (what := _to_record(effect)) is not None]
        self._done = done[journal.recorded :]
        self._seen = [UNSEEN for each in self._done if isinstance(each, Moving)]
        if journal.begun:
            self._log.add([schedule.SUCCEEDED])
            self.write()

    def perform(self, effect: Effect, now: float) -> Event | None:
        if self._unseen:
            self._look()
            self._write_some()
        self._now = now
        if self._cuts is not None and type(effect) is Apply:
            self._cuts.keep(effect)
        event = self._host.perform(effect, now)
        if isinstance(effect, Changed):
            self._done.append(effect)
            self._unseen = isinstance(effect, Moving)
            if isinstance(effect, CalculateVectors):  # it may be asked for again, by a successor
                self._fingerprint.updates = effect.calculation.number - 1
            return event
        self.write()
        match effect:
            case WriteSnapshot(number, version):
                self._log.add([schedule.SAVED, number, version])
                if self._cuts is not None:
                    assert isinstance(event, SnapshotWritten)
                    if (path := self._cuts.begin(event, version)) is not None:
                        self._log.close()
                        self._log, self._clocks = ScheduleWriter(path), ClockSteps()
            case End():
                self._log.close()
            case _ if not isinstance(effect, CopyTo | CopyMore):
                raise AssertionError(effect)
        return event

    def attach(self, payload: Payload) -> None:
        self._host.attach(payload)
        if _counts(payload):
            self._done.append(payload)
            if self._cuts is not None:
                self._cuts.answered(payload.owner)

    def rest(self) -> None:
        self._look()
        self._write_some()
        self._host.rest()

    def _write_some(self) -> None:
        if len(self._done) >= WRITTEN_TOGETHER or self._now - self._written_at >= WRITTEN_EVERY_S:
            self.write()

    def _look(self) -> None:
        if self._unseen:
            self._unseen = False
            self._seen.append(self._fingerprint() & SEEN)

    def write(self) -> None:
        """Bring the schedule up to date."""
        self._look()
        self._written_at = self._now
        record: list[object] = []
        fingerprints = iter(self._seen)
        for done in self._done:
            if isinstance(done, Apply):
                clock = done.terms[0].clock
                record += (schedule.APPLIED, next(fingerprints), short(done.share), _rates(done), len(done.terms))
                for term in done.terms:
                    who = self._who(term.owner)
                    record += (who, term.buffer, self._clocks.steps(who, term.clock), short(term.weight))
                record.append(done.clock - clock)
            elif isinstance(done, CalculateVectors):
                record += (schedule.CALCULATED, next(fingerprints), done.calculation)
            elif isinstance(done, AddPortions):
                who = self._who(done.owner)
                record += (schedule.ADDED, who, done.buffer, self._clocks.steps(who, done.clock))
            elif isinstance(done, GoBack):
                record += (schedule.WENT_BACK, done.version)
            else:
                record += (schedule.DELIVERED, self._who(done.owner), done.buffer)
        if record:
            self._log.add(record)
            if self._journal is not None:
                self._journal.record(len(self._done))
        self._done.clear()
        self._seen.clear()

    def _who(self, node: Node) -> int:
        return node.index + self._replicas * node.incarnation


class RecordedReplica(HostAround):
    """Records a replica. What it did is written before each push: until then nobody else has seen any of it."""

    def __init__(self, host: Host, log: ScheduleWriter, parts: ReplicaParts | None = None) -> None:
        super().__init__(host)
        self._log = log
        self._parts = parts
        self._record: list[Any] = []  # batches and fetches, not written yet
        self._count_at = -1  # where in it stands how many batches are alike, if its last entry is of batches
        self._clock = 0  # of the last push; the first is 1
        self._fetches = 0  # taken into use
        self._push = schedule.PUSHED  # the next one's tag
        self._bits = self._epoch = self._length = self._stop = -1  # of the last batch

    def perform(self, effect: Effect, now: float) -> Event | None:
        event = self._host.perform(effect, now)
        if type(effect) is Compute:
            if event is not None:  # else somebody else computes, and will say so
                self.computed(effect, type(event) is not GradientComputed or event.finite)
        elif type(effect) is UseWeights:
            self._record += (schedule.USED, effect.buffer)
            self._count_at = -1
            self._fetches += 1
        elif type(effect) is Keep:
            self._record += (schedule.KEPT, effect.buffer, short(effect.weight), effect.accumulate)
            self._count_at = -1
        elif type(effect) is PreparePush:
            self._push = schedule.PREPARED
        elif type(effect) is End:
            self._write()
            self._log.close()
        return event

    def attach(self, payload: Payload) -> None:
        """Record a push. This is called once for each shard, and only the first call of a push counts."""
        if payload.clock != self._clock:
            self._record += (self._push, payload.clock - self._clock, payload.buffer)
            self._clock = payload.clock
            self._push = schedule.PUSHED
            self._write()
            if self._parts is not None and self._log.long:
                self._log.close()
                self._log = ScheduleWriter(self._parts.next(self._fetches))
                self._log.add([schedule.PART, self._clock, self._fetches])
                self._bits = self._epoch = self._length = self._stop = -1

    def _write(self) -> None:
        self._log.add(self._record)
        self._record.clear()
        self._count_at = -1

    def computed(self, batch: Compute, finite: bool, left_out: bool = False) -> None:
        """A batch whose gradient is there, or that a script has left out.

        One that gave a NaN is written at once, because the run may end with it.
        """
        start, stop, epoch, record = batch.start, batch.stop, batch.epoch, self._record
        length, skipped = stop - start, start - self._stop
        bits = int(finite) | batch.local_step << 1 | batch.buffer + 1 << 2 | left_out << 4
        count_at = len(record) + 2
        if length != self._length or epoch != self._epoch or skipped < 0:
            self._length, self._epoch = length, epoch
            record += (schedule.COMPUTED, bits, 1, epoch, start, length)
        elif skipped:
            record += (schedule.SKIPPED, bits, 1, skipped)
        elif bits == self._bits and self._count_at >= 0:
            count_at = self._count_at
            record[count_at] += 1
        else:
            record += (schedule.CONTINUED, bits, 1)
        self._stop, self._bits, self._count_at = stop, bits, count_at
        if not finite:
            self._write()


def _counts(payload: Payload) -> bool:
    """An evaluator only looks, and other parts get the same."""
    return payload.kind != "gradient" and payload.owner.role == "replica" and payload.part <= 0


def _to_record(effect: Effect) -> Changed | Payload | None:
    match effect:
        case Apply() | GoBack() | CalculateVectors() | AddPortions():
            return effect
        case Transmit(payload=Payload() as payload, again=False) | Attach(payload) if _counts(payload):
            return payload
    return None


def _rates(update: Apply) -> object:
    rate = short(update.rate)
    return rate if not update.factors else [rate, *(None if f is None else short(f) for f in update.factors)]
