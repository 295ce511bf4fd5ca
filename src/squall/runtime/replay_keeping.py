"""What a run's processes keep for a replay from its midst, and when they remove it. See `runtime.replay_starts`."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import msgspec

from squall.protocol.effects import Apply, Term
from squall.protocol.events import SnapshotWritten
from squall.protocol.nodes import Node
from squall.runtime.attempts import read_start
from squall.runtime.job import Job
from squall.runtime.replay_starts import (
    ShardCut,
    complete,
    cuts_at,
    fetches_before,
    has_all,
    home,
    keep_push,
    kept_push,
    numbers,
    replica_logs,
)
from squall.runtime.schedule import Damaged, packed
from squall.runtime.snapshot import Snapshots, second_name
from squall.runtime.store import Store

KEPT_FETCHES = 16  # a shard keeps no more pushes of a replica than are made in so many, if another has no part to show


class _Open:
    """A snapshot after which a shard may still apply pushes that were computed before it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.everywhere = False  # all shards have their part of it
        self.fetches: dict[Node, int] = {}  # of each replica, answered since that was seen
        self.kept: dict[Node, int] = {}  # pushes of each replica

    def wants(self, owner: Node, at_most: int) -> bool:
        """Whether the next push of this replica may have been computed before the snapshot.

        It is not, once a second fetch was answered: that began when all shards had their parts.
        """
        kept = self.kept.get(owner, 0)
        if kept >= at_most:
            return False
        self.kept[owner] = at_most if self.fetches.get(owner, 0) >= 2 else kept + 1
        return True


class ShardCuts:
    """What a shard keeps beside its schedule. Where the disk is full a snapshot is kept no longer; training goes on."""

    def __init__(self, job: Job, node: Node, store: Store, last: int) -> None:
        assert job.schedule is not None
        loop = job.recipe.loop
        self._attempt, self._node, self._store, self._last = job.schedule, node, store, last
        self._shards = job.recipe.shards
        self._snapshots = Snapshots(job.directory)
        self._with_weights = loop.update.compensation is not None
        self._fetches: dict[str, int] = {}  # of each replica, answered
        self._open: list[_Open] = []  # the newest snapshots
        cadence = loop.exchanges.cadence
        self._at_most = KEPT_FETCHES * (1 + cadence.fetch_every // cadence.push_every)

    def begin(self, written: SnapshotWritten, version: int) -> Path | None:
        """The shard's part of a snapshot is there; returns where its schedule goes on, None: where it is."""
        number = written.number
        if written.error:
            return None
        base = home(self._attempt, number) / str(self._node)
        part = self._snapshots.part(number, self._node.index, self._shards)
        try:
            base.parent.mkdir(mode=0o700, exist_ok=True)
            second_name(part, base.with_name(f"{base.name}.safetensors"))
            told = base.with_name(f"{base.name}.partial")
            told.write_bytes(msgspec.json.encode(ShardCut(version, self._fetches, written.checksum)))
            told.rename(base.with_name(f"{base.name}.json"))
        except OSError as error:
            self._warn(number, error.strerror)
            return None
        with suppress(OSError):  # what is not removed goes another time
            self._prune(number)
        self._open = [*self._open[-self._last :], _Open(number)]
        return base

    def answered(self, node: Node) -> None:
        """A fetch of a replica."""
        name = str(node)
        self._fetches[name] = self._fetches.get(name, 0) + 1
        for cut in self._open:
            if not cut.everywhere:
                cut.everywhere = has_all(self._attempt, cut.number, self._shards)
            if cut.everywhere:
                cut.fetches[node] = cut.fetches.get(node, 0) + 1

    def keep(self, update: Apply) -> None:
        """Keep the pushes of an update that a replay from an open snapshot could not compute again."""
        for term in update.terms:
            numbers = [cut.number for cut in self._open if cut.wants(term.owner, self._at_most)]
            if numbers:
                self._save(term, numbers)

    def _save(self, term: Term, numbers: list[int]) -> None:
        path, *others = [kept_push(self._attempt, n, self._node, term.owner, term.clock) for n in numbers]
        store = self._store
        part = slice(store.start, store.stop)
        push = {"gradient": store.arena.gradient(term.slot, term.buffer)[part].clone()}
        if self._with_weights:
            push["weights"] = store.arena.weights(term.slot, 0)[part].clone()
        try:
            keep_push(path, push)
            for other in others:
                second_name(path, other)
        except Exception as error:  # safetensors has an error type of its own for a full disk
            path.unlink(missing_ok=True)
            self._open = []
            self._warn(numbers[-1], str(error))

    def _warn(self, number: int, why: str | None) -> None:
        sys.stderr.write(f"squall: warning: no replay will begin at snapshot {number}: {why}\n")

    def _prune(self, newest: int) -> None:
        """Remove what no replay will begin at. The newest does not count: other shards may not have come to it."""
        found = [number for number in complete(self._attempt, self._shards) if number < newest]
        if len(found) < self._last:
            return
        _remove(self._attempt / str(self._node))
        for number in numbers(self._attempt):
            if number < found[-self._last]:
                kept = home(self._attempt, number)
                with suppress(OSError):  # another shard has removed the directory, or has files there
                    for path in kept.glob(f"*{self._node}*"):
                        path.unlink(missing_ok=True)
                    kept.rmdir()
        if self._node.index == 0:
            self._remove_older_attempts()

    def _remove_older_attempts(self) -> None:
        """Remove older attempts of which only the end is kept. What was recorded as a whole stays."""
        for path in self._attempt.parent.iterdir():
            if path.name.isdecimal() and int(path.name) < int(self._attempt.name):
                with suppress(Damaged):
                    if read_start(path).end_alone:
                        shutil.rmtree(path, ignore_errors=True)


class ReplicaParts:
    """A replica's schedule in parts, of which the oldest go when no replay needs them any more."""

    def __init__(self, job: Job, node: Node) -> None:
        assert job.schedule is not None
        self._attempt, self._node, self._shards = job.schedule, node, job.recipe.shards
        self._parts = {0: 0}  # number -> fetches taken into use before
        with suppress(OSError):
            self._prune()

    def next(self, fetches: int) -> Path:
        """Where the schedule goes on."""
        with suppress(OSError):
            self._prune()
        number = max(self._parts) + 1
        self._parts[number] = fetches
        return self._attempt / f"{self._node}+{number}"

    def _prune(self) -> None:
        found = complete(self._attempt, self._shards)
        if not found or all((self._attempt / str(Node("shard", i))).exists() for i in range(self._shards)):
            return
        try:
            cuts = cuts_at(self._attempt, found[0], self._shards)
        except Damaged:  # it is being removed
            return
        begins = fetches_before(cuts, self._node)
        numbers = sorted(self._parts)
        for number, after in pairwise(numbers):
            if self._parts[after] <= begins:
                del self._parts[number]
                _remove(self._attempt / (f"{self._node}+{number}" if number else str(self._node)))
        # Where a shard had sent weights to a process by then, those before it in the slot computed nothing more.
        slot = self._node.index
        known = [Node.parse(name).incarnation for cut in cuts for name in cut.fetches if Node.parse(name).index == slot]
        for node, paths in replica_logs(self._attempt).items():
            if node.index == slot and node.incarnation < max(known, default=0):
                for path in paths:
                    _remove(path)


def _remove(path: Path) -> None:
    for each in (path, packed(path)):
        each.unlink(missing_ok=True)
