"""What a shard's backup works on: numbers of its own, which it moves as its shard has moved them."""

from __future__ import annotations

import dataclasses

from squall.protocol.backup import TakeCopy
from squall.protocol.effects import Effect, End, Payload
from squall.protocol.events import CopyTaken, Event, PeerRefused
from squall.protocol.nodes import Node
from squall.runtime import whole
from squall.runtime.driver import Host
from squall.runtime.hosts import ShardHost
from squall.runtime.job import Job
from squall.runtime.vectors import VectorHost
from squall.strategies.work import BatchMethod

WHY_AT_MOST = 300  # characters of why a shard was refused


class BackupHost(Host):
    """Has nothing until all that the shard is has come."""

    def __init__(self, job: Job, node: Node) -> None:
        self._legacy, self._index = job.backups[node], node.index
        self._job = dataclasses.replace(job, legacies={node.index: self._legacy})
        self._shard: ShardHost | VectorHost | None = None
        self._had = 0  # elements that have come

    def attach(self, payload: Payload) -> None:
        """Weights lie where replicas of another machine will not look. Who takes over sends them anew.

        It needs those that each replica computes on, to correct what that pushes.
        """
        if isinstance(self._shard, ShardHost):
            self._shard.delivered(payload)

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case TakeCopy(payload):
                return self._take(payload)
            case End():
                return None
            case _:
                assert self._shard is not None
                return self._shard.perform(effect, now)

    def _take(self, payload: Payload) -> Event:
        try:
            return self._taken(payload)
        except (OSError, MemoryError):
            raise  # it is this machine that cannot
        except Exception as error:
            shard = Node("shard", self._index)
            return PeerRefused(shard, f"it sends what no shard is: {type(error).__name__}: {error}"[:WHY_AT_MOST])

    def _taken(self, payload: Payload) -> CopyTaken:
        """Raises anything for what is no shard."""
        assert self._job.scratch is not None
        path = whole.path_of(self._job.scratch, payload.owner, payload.clock)
        if self._shard is not None:
            if isinstance(self._shard, VectorHost):
                raise ValueError("vectors come as a whole")
            self._had = whole.put_piece(self._shard.store, whole.read_piece(path), self._had)
            return CopyTaken(None, self._had == len(self._shard.store.weights))
        found = whole.read(path)
        kind = VectorHost if isinstance(self._job.recipe.work, BatchMethod) else ShardHost
        self._shard = kind.of_copy(self._job, self._index, found)
        copied = whole.machine(found.state)
        copied.journal_into(self._legacy.journal)
        return CopyTaken(copied, isinstance(self._shard, VectorHost))
