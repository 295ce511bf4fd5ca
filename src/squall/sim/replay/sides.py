"""The nodes of a replay: their records, and how far each has come."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

from squall.protocol.core import AddPortions, Compute, Node
from squall.runtime.hosts import ReplicaHost, ShardHost
from squall.runtime.job import Job
from squall.runtime.portions import PortionHost
from squall.runtime.records import Applied, Delivered, Ended, Fingerprint, Record, records
from squall.runtime.schedule import Damaged
from squall.runtime.sequential import LoneHost
from squall.runtime.vectors import VectorHost
from squall.sim.replay.scripts import ScriptHost

Replica = ReplicaHost | PortionHost | LoneHost | ScriptHost


class Side:
    """A node: its records, and how far it has come.

    Its file is opened when the first record is asked for, and is not open any more behind the last: a run may have had
    thousands of processes, of which few lived at once.
    """

    def __init__(self, node: Node, path: Path, job: Job) -> None:
        self.node = node
        self.path = path
        self.damage = ""  # why the records end where they do, if they should not
        self.ended = False  # the process ended in good order
        self._job = job
        self._records: Iterator[Record] | None = None
        self._record: Record | None = None

    @property
    def record(self) -> Record | None:
        """The next one; None: there are no more."""
        if self._records is None:
            self._records = self.all()
            self._record = next(self._records, None)
        return self._record

    def all(self) -> Iterator[Record]:
        """All good records, from the first."""
        try:
            for record in records(self.path, self._job.recipe.replicas, self._job.task.examples):
                if isinstance(record, Ended):
                    self.ended = True
                else:
                    yield record
        except Damaged as damaged:
            self.damage = str(damaged)
        except OSError as error:
            self.damage = f"{self.path} cannot be read: {error.strerror}"

    def advance(self) -> None:
        assert self._records is not None
        self._record = next(self._records, None)


class ReplicaSide(Side):
    def __init__(self, node: Node, path: Path, job: Job) -> None:
        super().__init__(node, path, job)
        self.host: Replica | None = None  # None: not begun, or over
        self.begun = False
        self.clock = 0  # of its last push
        self.pushed: dict[int, int] = {}  # gradient buffer -> clock of the last push from it
        self.used = 0  # fetches taken into use
        self.batches: list[Compute] = []  # since the last push
        self.behind: dict[int, list[Compute]] = {}  # clock -> batches of a push that a shard may still apply


class ShardSide(Side):
    def __init__(self, node: Node, path: Path, job: Job, host: ShardHost | VectorHost, version: int) -> None:
        super().__init__(node, path, job)
        self.host = host
        self.version = version  # updates, with those before this attempt
        self.fingerprint = Fingerprint(host.store.weights)
        self.clocks: dict[Node, array[int]] = {}  # of the pushes of each replica that it applies
        self.deliveries: dict[Node, int] = {}  # to each replica, in all
        self.applied: dict[Node, int] = {}  # of those, so far
        self.delivered: dict[Node, int] = {}
        self.added: list[tuple[Node, int]] = []  # pushes in the sum since the last calculation
        for record in self.all():
            if isinstance(record, Applied):
                for term in record.update.terms:
                    self.clocks.setdefault(term.owner, array("q")).append(term.clock)
            elif isinstance(record, AddPortions):
                self.clocks.setdefault(record.owner, array("q")).append(record.clock)
            elif isinstance(record, Delivered):
                self.deliveries[record.to] = self.deliveries.get(record.to, 0) + 1

    def done_with(self, node: Node) -> bool:
        pushes = len(self.clocks.get(node, ()))
        return self.applied.get(node, 0) == pushes and self.delivered.get(node, 0) == self.deliveries.get(node, 0)

    def has_yet_to_apply(self, node: Node, clock: int) -> bool:
        """A push of this clock or an older one."""
        clocks, done = self.clocks.get(node), self.applied.get(node, 0)
        return clocks is not None and done < len(clocks) and clocks[done] <= clock
