"""The nodes of a replay: their records, and how far each has come."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby, islice
from pathlib import Path

from torch import Tensor

from squall.protocol.effects import AddPortions, Compute, Expect, Term, UseWeights
from squall.protocol.nodes import Node
from squall.replaying.losses import not_there
from squall.replaying.processes import ReplicaProcess
from squall.runtime.hosts import ReplicaHost
from squall.runtime.job import Job
from squall.runtime.kinds import kind_of
from squall.runtime.lone import LoneHost
from squall.runtime.portions import PortionHost
from squall.runtime.records import (
    Applied,
    Computed,
    Delivered,
    Fingerprint,
    NextFile,
    ProcessEnded,
    Pushed,
    Saved,
    ScheduleRecord,
    WentBack,
    records,
)
from squall.runtime.replay_starts import ShardCut, home, kept_push, kept_state, put_back, shard_logs
from squall.runtime.schedule import Damaged
from squall.runtime.store import Store

PUSHES_KEPT = 2  # of each replica: with overlap the one before the last may not be applied yet

ReplayedHost = ReplicaHost | PortionHost | LoneHost | ReplicaProcess


class ReplayedNode:
    """A node: its records, and how far it has come.

    Its file is opened when the first record is asked for, and is not open any more behind the last: a run may have had
    thousands of processes, of which few lived at once.
    """

    def __init__(self, node: Node, paths: Sequence[Path], job: Job) -> None:
        self.node = node
        self.paths = paths  # one, or its parts
        self.damage = ""  # why the records end where they do, if they should not
        self.broken = False  # a part is missing, or does not go on with the next
        self.ended = False  # the process ended in good order
        self._job = job
        self._records: Iterator[ScheduleRecord] | None = None
        self._record: ScheduleRecord | None = None

    @property
    def record(self) -> ScheduleRecord | None:
        """The next one; None: there are no more."""
        if self._records is None:
            self._records = self.all()
            self._record = next(self._records, None)
        return self._record

    @property
    def path(self) -> Path:
        """The last, or only part."""
        return self.paths[-1]

    def whole(self) -> Iterator[ScheduleRecord]:
        """All good records that there are."""
        last: ScheduleRecord | None = None
        for path in self.paths:
            if path != self.paths[0] and not (self.ended and self._leads_to(path, last)):
                self._break(f"{path} does not begin where what went before it ends")
                return
            self.ended = False
            try:
                for record in records(path, self._job.recipe.replicas, self._job.task.examples):
                    if isinstance(record, ProcessEnded):
                        self.ended = True
                    else:
                        last = record
                        yield record
            except Damaged as damaged:
                self.damage, self.broken = str(damaged), path != self.path
                return
            except FileNotFoundError:
                self._break(not_there(path, self._job.directory))
                return
            except OSError as error:
                self._break(f"{path} cannot be read: {error.strerror}")
                return

    def _leads_to(self, path: Path, last: ScheduleRecord | None) -> bool:
        """Whether this part goes on where the part before it ends, with its last record."""
        return True

    def _break(self, why: str) -> None:
        self.damage, self.broken = why, True

    def all(self) -> Iterator[ScheduleRecord]:
        """The records that are to be performed."""
        return self.whole()

    def advance(self) -> None:
        assert self._records is not None
        self._record = next(self._records, None)


class ReplayedReplica(ReplayedNode):
    def __init__(self, node: Node, paths: Sequence[Path], job: Job) -> None:
        super().__init__(node, paths, job)
        self.skipped = 0  # records before those that are performed
        self.begins = 0  # the fetch that it begins with
        self.given = -math.inf  # clock up to which its pushes are not computed: shards have kept them
        self.host: ReplayedHost | None = None  # None: not begun, or over
        self.begun = False
        self.clock = 0  # of its last push
        self.pushed: dict[int, int] = {}  # gradient buffer -> clock of the last push from it
        self.used = 0  # fetches taken into use
        self.batches: list[Compute] = []  # since the last push
        self.behind: dict[int, list[Compute]] = {}  # clock -> batches of a push that a shard may still apply

    def all(self) -> Iterator[ScheduleRecord]:
        return (record for record in islice(self.whole(), self.skipped, None) if not isinstance(record, NextFile))

    def whole(self) -> Iterator[ScheduleRecord]:
        """All good records that there are, as long as each part begins where the one before has come to."""
        clock = used = 0
        begun = False
        for record in super().whole():
            match record:
                case NextFile(before, fetches):
                    if begun and (before, fetches) != (clock, used):
                        self._break(f"a part of {self.path.with_name(str(self.node))} is missing before push {before}")
                        return
                    clock, used = before, fetches
                case Pushed():
                    clock = record.clock
                case UseWeights():
                    used += 1
            begun = True
            yield record

    def has_pushed(self, clock: int, buffer: int) -> None:
        self.clock = self.pushed[buffer] = clock
        self.behind[clock], self.batches = self.batches, []
        while len(self.behind) > PUSHES_KEPT:
            del self.behind[next(iter(self.behind))]

    def to_compute(self) -> Iterator[Expect]:
        """Batches in their order; one that is tried a second time is not loaded again."""
        records = (record.batch for record in self.all() if isinstance(record, Computed))
        for (epoch, start, stop), _ in groupby((batch.epoch, batch.start, batch.stop) for batch in records):
            yield Expect(epoch, start, stop)

    def begin_before(self, fetches: int) -> None:
        """Leave out the parts that end before this fetch."""
        for number, path in reversed(list(enumerate(self.paths))):
            with suppress(Damaged, OSError):
                first = next(records(path, self._job.recipe.replicas, self._job.task.examples), None)
                if isinstance(first, NextFile) and first.fetches <= fetches:
                    self.paths = self.paths[number:]
                    return


class ReplayedShard(ReplayedNode):
    """`updates` were made before this attempt. The replay begins at `snapshot`, or (None) where the attempt does."""

    def __init__(self, attempt: Path, job: Job, index: int, updates: int, snapshot: int | None = None) -> None:
        node = Node("shard", index)
        self._attempt, self._snapshot = attempt, snapshot
        super().__init__(node, shard_logs(attempt, node, snapshot), job)
        self.host = host = kind_of(job).shard_host(job, index)
        self.version = updates
        self.start, self.stop = host.store.start, host.store.stop
        self.fingerprint = Fingerprint(host.store.weights)
        self.clocks: dict[Node, array[int]] = {}  # of the pushes of each replica that it applies
        self.deliveries = Counter[Node]()  # to each replica, in all
        self.applied = Counter[Node]()  # pushes of each replica, so far
        self.delivered = Counter[Node]()  # to each replica, so far
        self.added: list[tuple[Node, int]] = []  # pushes in the sum since the last calculation
        self.calculated = 0  # the last of them
        self._returns = Counter[int]()  # to a version, in all
        self._kept: dict[int, dict[str, Tensor]] = {}  # states that it will return to
        for record in self.all():
            if isinstance(record, Applied):
                for term in record.update.terms:
                    self.clocks.setdefault(term.owner, array("q")).append(term.clock)
            elif isinstance(record, AddPortions):
                self.clocks.setdefault(record.owner, array("q")).append(record.clock)
            elif isinstance(record, Delivered):
                self.deliveries[record.to] += 1
            elif isinstance(record, WentBack):
                self._returns[record.version] += 1
        self.keep()

    def _leads_to(self, path: Path, last: ScheduleRecord | None) -> bool:
        return isinstance(last, Saved) and path.parent == home(self._attempt, last.number)

    def take_up(self, cut: ShardCut) -> None:
        """Give the shard the state that it had at the snapshot."""
        store, number = self.host.store, self._snapshot
        assert isinstance(store, Store)
        assert number is not None
        store.take_up(kept_state(self._attempt, number, self.node, cut), cut.version)
        self.fingerprint = Fingerprint(store.weights, cut.version - self.version)
        self.version = cut.version
        for name, count in cut.fetches.items():
            node = Node.parse(name)
            self.delivered[node] = count
            self.deliveries[node] += count

    def keep(self) -> None:
        """The state of now, if it will be needed again."""
        if self._returns[self.version]:
            self._kept[self.version] = {name: value.clone() for name, value in self.state().items()}

    def go_back(self, version: int) -> None:
        """As the run has: a process had died inside an update."""
        store, kept = self.host.store, self._kept.get(version)
        if kept is None:
            raise Damaged(f"{self.path}: it goes back to version {version}, which it has not had")
        assert isinstance(store, Store)
        store.optimizer.state.clear()
        store.take_up(kept, self.version)
        self._returns[version] -= 1
        if not self._returns[version]:
            del self._kept[version]

    @property
    def weights(self) -> Tensor:
        return self.host.store.weights

    def state(self) -> dict[str, Tensor]:
        return self.host.store.state()

    def kept(self, owner: Node, clock: int) -> Path:
        """The file of a push from before the owner's cut."""
        assert self._snapshot is not None
        return kept_push(self._attempt, self._snapshot, self.node, owner, clock)

    def put_back(self, term: Term) -> None:
        """Put a push that was kept, because the replay cannot compute it, into its gradient buffer."""
        assert isinstance(self.host.store, Store)
        put_back(self.kept(term.owner, term.clock), term, self.host.store)

    def done_with(self, node: Node) -> bool:
        """Whether it has applied and delivered all that this process had to do with it."""
        pushes = len(self.clocks.get(node, ()))
        return self.applied[node] == pushes and self.delivered[node] == self.deliveries[node]

    def has_yet_to_apply(self, node: Node, clock: int) -> bool:
        """Whether a push of this clock, or an older one, is still to be applied."""
        clocks, done = self.clocks.get(node), self.applied[node]
        return clocks is not None and done < len(clocks) and clocks[done] <= clock
