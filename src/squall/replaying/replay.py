"""A recorded training carried out again, one step at a time: the schedules of its nodes on the hosts that trained it.

Every node's records are performed in their order. What orders them between nodes is what ordered them in the run:

- an update waits until its pushes were made (`Pushed`);
- a gradient buffer is written again only when no shard has still to apply what was pushed from it;
- weights are delivered for the k-th time to a replica when that is about to take the k-th fetch into use
  (`UseWeights`), and taken into use when all shards have delivered them;
- a replacement begins when no shard has still to do with its predecessor.

All of these held in the run, so some node can always go on, and which one goes first makes no difference: the hosts
share nothing but buffers, and no two of them touch one at the same time. With overlap a replica computes while its
fetch is answered; here it computes first, which it could have done in the run as well, since that takes nothing that
the exchange brings.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from squall.protocol.effects import (
    AddPortions,
    CalculateVectors,
    Effect,
    End,
    Keep,
    Payload,
    PreparePush,
    UseWeights,
)
from squall.protocol.events import BatchSkipped, Event, GradientComputed
from squall.protocol.nodes import Node
from squall.replaying.beginning import begun_at
from squall.replaying.losses import not_there
from squall.replaying.processes import Processes
from squall.replaying.replayed_nodes import ReplayedHost, ReplayedNode, ReplayedReplica, ReplayedShard
from squall.replaying.scripts import ScriptHost
from squall.runtime.driver import Host
from squall.runtime.hosts import ReplicaHost
from squall.runtime.job import Job, own_model
from squall.runtime.kinds import kind_of
from squall.runtime.lone import LoneHost
from squall.runtime.portions import PortionHost
from squall.runtime.records import (
    Applied,
    Calculated,
    Computed,
    Delivered,
    Pushed,
    Saved,
    WentBack,
)
from squall.runtime.replay_starts import replica_logs
from squall.runtime.schedule import Damaged
from squall.runtime.store import Store

if TYPE_CHECKING:
    from squall.replaying.findings import Observer


class Replay:
    """One attempt. `run` goes as far as the schedule leads, or the observer lets it.

    With `processes` the replicas are forked from this one, which therefore has one thread.
    """

    def __init__(
        self, job: Job, schedule: Path, observer: Observer, processes: Processes | None = None, *, updates: int = 0,
        snapshot: int | None = None,
    ) -> None:  # fmt: skip
        self._schedule = schedule
        self._observer = observer
        self._processes = processes
        self._lone = job.recipe.alone
        self._fetched = kind_of(job).fetched
        self._stopped = False
        self._threads = 0
        logs = replica_logs(schedule)
        self.job = job = processes.completed(job, min(logs)) if processes is not None and logs else job
        self.replicas = {node: ReplayedReplica(node, paths, job) for node, paths in logs.items()}
        if snapshot is None:
            self.shards = [ReplayedShard(schedule, job, i, updates) for i in range(job.recipe.shards)]
        else:
            self.shards = begun_at(snapshot, schedule, job, updates, self.replicas)

    def run(self) -> None:
        try:
            moved = True
            while moved and not self._stopped:
                moved = False
                for replica in self.replicas.values():
                    while not self._stopped and self._replica_moves(replica):
                        moved = True
                for shard in self.shards:
                    while not self._stopped and self._shard_moves(shard):
                        moved = True
        finally:
            for replica in self.replicas.values():
                self._close(replica)

    @property
    def why(self) -> str:
        """What kept the replay from going on to the end; empty if nothing did."""
        sides: list[ReplayedNode] = [*self.shards, *self.replicas.values()]
        if self._stopped:
            return ""
        damages = [side.damage for side in sides if side.damage]
        if len(damages) > 1:
            return f"{damages[0]}; {len(damages) - 1} more files are damaged, too"
        return damages[0] if damages else next((self._missing(side) for side in sides if side.record is not None), "")

    def _missing(self, side: ReplayedNode) -> str:
        """Why this node could not go on, though its own schedule does."""
        if isinstance(side.record, Applied):
            for term in side.record.update.terms:
                owner = self.replicas.get(term.owner)
                if owner is None:
                    return not_there(self._schedule / str(term.owner), self.job.directory)
                if owner.record is None and owner.clock < term.clock:
                    return f"{self._schedule / str(term.owner)} is cut off: it lacks push {term.clock}"
        short = [str(shard.path) for shard in self.shards if shard.record is None and not shard.ended]
        if short:
            return f"{', '.join(short)} is cut off: its process did not end in good order"
        return f"the schedules in {self._schedule} do not fit together: {side.path.name} waits at {side.record}"

    # ------------------------------------------------------------ replicas

    def _replica_moves(self, replica: ReplayedReplica) -> bool:
        """Perform the next record, if it can be."""
        if not replica.begun and not self._may_begin(replica):
            return False
        if replica.record is None:
            self._close(replica)
            return False
        if not replica.begun:
            self._begin(replica)
        match replica.record:
            case Computed() as computed:
                if self._in_use(replica, computed.batch.buffer):
                    return False
                self._compute(replica, computed)
            case Pushed(clock, buffer, prepared):
                if prepared and self._in_use(replica, buffer):
                    return False
                if prepared:
                    self._perform(replica, PreparePush(buffer))
                replica.has_pushed(clock, buffer)
            case Keep(buffer) as effect:
                if self._in_use(replica, buffer):
                    return False
                self._perform(replica, effect)
            case UseWeights() as effect:
                if any(shard.delivered[replica.node] <= replica.used for shard in self.shards):
                    return False
                self._perform(replica, effect)
                replica.used += 1
            case _:
                raise Damaged(f"{replica.path}: {replica.record} is no record of a replica")
        replica.advance()
        return True

    def _may_begin(self, replica: ReplayedReplica) -> bool:
        """Whether its predecessors in the slot are over."""
        slot, incarnation = replica.node.index, replica.node.incarnation
        for other in self.replicas.values():
            before = other.node.index == slot and other.node.incarnation < incarnation
            if before and not (other.record is None and all(shard.done_with(other.node) for shard in self.shards)):
                return False
        return True

    def _begin(self, replica: ReplayedReplica) -> None:
        replica.begun = True
        replica.host = self._host(replica.node)
        own_workers = self.job.task.loader.get("num_workers", 0)
        if replica.host.began.workers if isinstance(replica.host, ScriptHost) else own_workers:
            for batch in replica.to_compute():
                self._perform(replica, batch)

    def _host(self, node: Node) -> ReplayedHost:
        if self._processes is not None:
            return self._processes.host(self.job, node)
        job = own_model(self.job)
        if not self._lone:
            made = kind_of(job).replica_host(job, node)
            assert isinstance(made, ReplicaHost | PortionHost)
            return made
        store = self.shards[0].host.store
        assert isinstance(store, Store)
        return LoneHost(job, store)

    def _in_use(self, replica: ReplayedReplica, buffer: int) -> bool:
        """Whether a shard has still to apply what was pushed from the buffer."""
        clock = replica.pushed.get(buffer)
        return clock is not None and any(shard.has_yet_to_apply(replica.node, clock) for shard in self.shards)

    def _compute(self, replica: ReplayedReplica, computed: Computed) -> None:
        assert replica.host is not None
        if self._observer.computing(replica.node, computed, replica.host):
            self._stopped = True
            return
        found = self._perform(replica, computed.batch)
        assert isinstance(found, GradientComputed | BatchSkipped)
        if computed.finite:
            replica.batches.append(computed.batch)
        self._stopped |= self._observer.computed(replica.node, computed, found)

    def _perform(self, replica: ReplayedReplica, effect: Effect) -> Event | None:
        host: Host | None = replica.host
        assert host is not None
        if self._processes is None:
            self._use_threads(self.job.plan.threads)
        return host.perform(effect, 0.0)

    def _close(self, replica: ReplayedReplica) -> None:
        if replica.host is not None:
            replica.host.perform(End("finished"), 0.0)
            replica.host = None

    # ------------------------------------------------------------ shards

    def _shard_moves(self, shard: ReplayedShard) -> bool:
        match shard.record:
            case Applied(update) as applied:
                if not all(self._has_pushed(term.owner, term.clock) for term in update.terms):
                    return False
                self._use_threads(self._shard_threads)
                for term in update.terms:
                    if term.clock <= self.replicas[term.owner].given:
                        shard.put_back(term)
                shard.host.perform(update, 0.0)
                shard.version += 1
                shard.keep()
                pushes = [(term.owner, term.clock) for term in update.terms]
                shard.applied.update(owner for owner, _ in pushes)
                self._stopped |= self._observer.updated(shard, pushes, applied.fingerprint)
            case Calculated() as calculated:
                self._calculate(shard, calculated)
            case AddPortions(node, _, clock) as effect:
                if not self._has_pushed(node, clock):
                    return False
                shard.host.perform(replace(effect, number=shard.applied.total() + 1), 0.0)
                shard.applied[node] += 1
                shard.added.append((node, clock))
            case Delivered(node, buffer):
                if not self._deliver(shard, node, buffer):
                    return False
            case Saved() as saved:
                self._stopped |= self._observer.saved(shard, saved)
            case WentBack(version):
                shard.go_back(version)
            case None:
                return False
            case _:
                raise Damaged(f"{shard.path}: {shard.record} is no record of a shard")
        shard.advance()
        return True

    @property
    def _shard_threads(self) -> int:
        """One for a shard's process, whatever it had: no bit of an update by element depends on it."""
        return 1 if self.job.plan.settings.launcher != "inline" and not self._lone else self.job.plan.threads

    def _calculate(self, shard: ReplayedShard, calculated: Calculated) -> None:
        """A calculation counts as an update if it moves the weights. It is compared in either case.

        Who succeeded a shard may have asked for one again, which was recorded already and changes nothing.
        """
        if calculated.calculation.number <= shard.calculated:
            return
        shard.calculated = calculated.calculation.number
        self._use_threads(self._shard_threads)
        shard.host.perform(CalculateVectors(calculated.calculation), 0.0)
        shard.version += any(combine.target == "weights" for combine in calculated.calculation.combine)
        pushes, shard.added = shard.added, []
        self._stopped |= self._observer.updated(shard, pushes, calculated.fingerprint)

    def _has_pushed(self, node: Node, clock: int) -> bool:
        replica = self.replicas.get(node)
        return replica is not None and (replica.clock >= clock or clock <= replica.given)

    def _deliver(self, shard: ReplayedShard, node: Node, buffer: int) -> bool:
        """False while the replica may still look at what lies in the buffer; one that has died looks at nothing."""
        replica, count = self.replicas.get(node), shard.delivered[node]
        if replica is not None and replica.record is not None and count >= replica.begins:
            if not (replica.begun and isinstance(replica.record, UseWeights) and replica.used == count):
                return False
            shard.host.attach(Payload(self._fetched, node, buffer, replica.clock, shard.node.index))
        shard.delivered[node] = count + 1
        return True

    def _use_threads(self, threads: int) -> None:
        if threads != self._threads:
            torch.set_num_threads(threads)
            self._threads = threads
