"""The table of what carries out each kind of work: the machines of its nodes, and the hosts of its effects."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple, Never

from squall.protocol.answering.replica import Answerer
from squall.protocol.backup import Backup
from squall.protocol.collective.replica import CollectiveReplica
from squall.protocol.copied import Copied
from squall.protocol.deputy import Deputy
from squall.protocol.effects import PayloadKind
from squall.protocol.evaluator import Evaluator
from squall.protocol.link import Linked
from squall.protocol.machine import Machine
from squall.protocol.nodes import COORDINATOR, DEPUTY, Node
from squall.protocol.nursery import NurseryMachine
from squall.protocol.parcels import Parcelled, PartMachine
from squall.protocol.replica import Replica
from squall.protocol.sandblaster.replica import BatchReplica
from squall.protocol.sandblaster.shard import BatchShard
from squall.protocol.shard import Shard
from squall.protocol.shard_duties import ShardDuties
from squall.protocol.speaking import ANSWERS, BATCHES, COLLECTIVE, LOOP, Says
from squall.protocol.succession import Journaled
from squall.runtime.answering import AnswerHost
from squall.runtime.backing import BackupHost
from squall.runtime.collective.host import CollectiveHost, in_a_process
from squall.runtime.driver import Host
from squall.runtime.hosts import EvaluatorHost, ReplicaHost, ShardHost
from squall.runtime.job import Job
from squall.runtime.machines import (
    answer_coordinator,
    batch_coordinator,
    begun,
    collective_coordinator,
    has_deputy,
    lease_coordinator,
)
from squall.runtime.pieces import FarShardHost
from squall.runtime.portions import PortionHost
from squall.runtime.recording import recorded
from squall.runtime.vectors import VectorHost
from squall.strategies.work import Answering, BatchMethod, Collective, Loop, Work


class Kind(NamedTuple):
    coordinator: Callable[[Job], Machine]
    shard: Callable[[Job, int], ShardDuties]
    replica: Callable[[Job, Node], Machine]
    shard_host: Callable[[Job, int], ShardHost | VectorHost]
    replica_host: Callable[[Job, Node], ReplicaHost | PortionHost | CollectiveHost | AnswerHost]
    fetched: PayloadKind  # the payload that shards answer with
    says: Says  # who says what to whom


def _shard(job: Job, index: int) -> Shard:
    return Shard(index, job.recipe.loop.exchanges, *begun(job), copied=index in job.legacies)


def _replica(job: Job, node: Node) -> Replica:
    exchanges, part = job.recipe.loop.exchanges, _part(job)
    return Replica(node, job.recipe.shards, job.task.batch_size, exchanges, os.getpid(), _address(job), part)


def _batch_shard(job: Job, index: int) -> BatchShard:
    return BatchShard(index, *begun(job))


def _batch_replica(job: Job, node: Node) -> BatchReplica:
    return BatchReplica(node, job.recipe.shards, os.getpid(), _address(job), _part(job))


def _replica_host(job: Job, node: Node) -> ReplicaHost:
    return ReplicaHost(job, node.index, job.inside, job.own)


def _portion_host(job: Job, node: Node) -> PortionHost:
    return PortionHost(job, node.index, job.inside)


def _no_shard(job: Job, index: int) -> Never:
    raise AssertionError("there are no shards")


def _collective_replica(job: Job, node: Node) -> CollectiveReplica:
    return CollectiveReplica(node, job.recipe.replicas, *begun(job), os.getpid(), _address(job), job.recipe.divided)


def _answerer(job: Job, node: Node) -> Answerer:
    return Answerer(node, job.task.batch_size, os.getpid(), _address(job))


def _answer_host(job: Job, node: Node) -> AnswerHost:
    return AnswerHost(job, node.index)


def _part(job: Job) -> int:
    """Of a replica that lies on several machines this process has a part."""
    return -1 if job.first is None else 0


def _address(job: Job) -> str:
    """Where a replica is called by others, and by its own parts; empty where it is not."""
    return "" if job.site is None or job.listener is None else job.site.address(job.listener)


KINDS: dict[type[Work], Kind] = {
    Loop: Kind(lease_coordinator, _shard, _replica, ShardHost, _replica_host, "weights", LOOP),
    BatchMethod: Kind(batch_coordinator, _batch_shard, _batch_replica, VectorHost, _portion_host, "trial", BATCHES),
    Collective: Kind(
        collective_coordinator, _no_shard, _collective_replica, _no_shard, in_a_process, "weights", COLLECTIVE
    ),
    Answering: Kind(answer_coordinator, _no_shard, _answerer, _no_shard, _answer_host, "weights", ANSWERS),
}


def kind_of(job: Job) -> Kind:
    return KINDS[type(job.recipe.work)]


def machine(job: Job, node: Node) -> Linked:
    """A node's machine, behind its links."""
    kind = kind_of(job)
    match node.role:
        case "coordinator":
            if job.journal is None:
                return Linked(kind.coordinator(job))
            if job.succeeds(node):
                return job.journal.succeed()
            return (Copied if has_deputy(job) else Journaled)(kind.coordinator(job), job.journal)
        case "deputy":
            assert job.site is not None
            called, pulse = job.site.address(job.site.listeners[DEPUTY]), job.site.pulse
            return Linked(Deputy(node, job.site.machine, os.getpid(), called, pulse))
        case "shard":
            legacy = job.legacies.get(node.index)
            if legacy is not None and job.succeeds(node):
                before, _ = begun(job)
                copied = before + legacy.copy.updates if legacy.numbers.torn else None
                return legacy.journal.succeed(before + legacy.numbers.updates, copied)
            shard, parts = kind.shard(job, node.index), job.plan.settings.parts
            behind: Machine = shard
            if job.site is not None and parts > 1 and job.plan.settings.spread_parts is not None:
                behind = Parcelled(shard, parts, [Node(*seat) for seat in job.site.seats if seat[0] == "part"])
            if legacy is None:
                return Linked(behind)
            return (Copied if job.plan.settings.copies > 1 else Journaled)(behind, legacy.journal)
        case "backup":
            called = "" if job.site is None else job.site.address(job.site.listeners[Node(node.role, node.index)])
            return Linked(Backup(node, os.getpid(), called))
        case "part":
            return Linked(PartMachine(node, job.plan.settings.parts, job.recipe.shards, job.arena.shape.weights))
        case "replica":
            return Linked(kind.replica(job, node))
        case "nursery":
            return Linked(NurseryMachine(node))
        case _:
            return Linked(Evaluator(node, job.recipe.shards, os.getpid(), job.plan.keep_best or ""))


def host(job: Job, node: Node, made: CollectiveHost | None = None) -> Host:
    """What carries out the effects of a shard, a replica or the evaluator. It keeps a schedule if the run does.

    `made`: a replica's, where a script has the loop.
    """
    if node.role == "evaluator":
        return EvaluatorHost(job)
    if node.role == "backup":
        return BackupHost(job, node)
    kind = kind_of(job)
    own = made or (kind.shard_host(job, node.index) if node.role == "shard" else kind.replica_host(job, node))
    wrapped = recorded(own, job, node)
    if job.site is not None and not job.site.has(COORDINATOR):
        if node.role == "shard":
            part = (node.index, job.recipe.shards)
            return FarShardHost(wrapped, job.directory, node.index, lambda: part, job.site.pieces)
        if isinstance(own, CollectiveHost):
            return FarShardHost(wrapped, job.directory, node.index, own.part, job.site.pieces)
    return wrapped
