"""Coordinators as a job describes them, and where a run's processes begin."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from msgspec import UNSET

from squall.protocol.answering.coordinator import AnswerCoordinator
from squall.protocol.collective.coordinator import CollectiveCoordinator
from squall.protocol.leases import Leases
from squall.protocol.loop_coordinator import LoopCoordinator
from squall.protocol.nodes import COORDINATOR, Node, part_nodes, replica_node, shard_nodes
from squall.protocol.nursery_messages import PartPlace
from squall.protocol.policy import Policy
from squall.protocol.sandblaster.coordinator import BatchCoordinator, BatchWork
from squall.protocol.sandblaster.method import MethodState
from squall.protocol.sandblaster.portions import Balance
from squall.runtime import best
from squall.runtime.answering import PredictionTask
from squall.runtime.answers import Answers
from squall.runtime.job import Job
from squall.runtime.journal import Journal
from squall.runtime.legacy import Legacy, shared_memory
from squall.runtime.snapshot import Manifest
from squall.runtime.vectors import vectors_bytes
from squall.strategies.work import BatchMethod, Loop

COORDINATOR_BYTES = 1 << 28  # of its state; what is not used takes no memory


def nodes(job: Job) -> list[Node]:
    """The processes that begin on this machine: first whom others connect to, last who computes all along."""
    evaluators = [Node("evaluator", job.recipe.replicas)] if job.task.validate is not None else []
    shards = shard_nodes(job.recipe.shards)
    backups = [Node("backup", shard.index) for shard in shards if job.plan.settings.copies > 1]
    replicas = [replica_node(slot, 0) for slot in range(job.recipe.replicas)]
    everybody = (COORDINATOR, *shards, *backups, *evaluators, *replicas)
    return [node for node in everybody if job.site is None or job.site.has(node)]


def with_legacies(job: Job) -> Job:
    """With what the coordinator and the shards that begin on this machine leave to their successors."""
    if job.site is None or job.site.has(COORDINATOR):
        job = replace(job, journal=Journal(shared_memory(Journal.size(COORDINATOR_BYTES))))
        if job.site is not None:
            job.site.pieces.outlive(max(job.recipe.shards, job.recipe.replicas), 4 * job.layout.length)
    if not isinstance(job.recipe.work, Loop | BatchMethod):
        return job
    spans = {n.index: job.layout.shard_range(n.index, job.recipe.shards) for n in nodes(job) if n.role == "shard"}
    legacies = {index: legacy_of(job, stop - start) for index, (start, stop) in spans.items()}
    return replace(job, legacies=legacies)


def legacy_of(job: Job, elements: int, apart: bool = False) -> Legacy:
    """What a shard of so many elements leaves, or its backup. `apart`: as `Legacy` has it."""
    work = job.recipe.work
    if isinstance(work, BatchMethod):
        return Legacy(elements, vectors=vectors_bytes(elements, work.rules.history), apart=apart)
    # A slot on a backup's machine may have other weights, or later ones, than those that its shard corrects with.
    needs_fetched = job.plan.settings.copies > 1 and job.recipe.loop.update.compensation is not None
    return Legacy(elements, fetched=job.arena.shape.replicas + 1 if needs_fetched else 0, apart=apart)


def firsts(job: Job) -> dict[Node, PartPlace | None]:
    """Of the replicas that begin on this machine those whose other parts have places of their own, with theirs."""
    if job.site is None:
        return {}
    begun, seats = nodes(job), {Node(*process) for process in job.site.seats}
    apart = [n for n in begun if n.role == "replica" and not seats.isdisjoint(part_nodes(n, job.plan.settings.parts))]
    return {node: PartPlace(node, job.site.machine) for node in apart}


def collective_coordinator(job: Job) -> CollectiveCoordinator:
    number = job.restored.manifest.number if job.restored is not None else 0
    policy = msgspec.structs.replace(_policy(job), shards=0)  # also where a single process has one of its own
    return CollectiveCoordinator(policy, _leases(job), begun(job)[0], number, job.recipe.divided)


def lease_coordinator(job: Job) -> LoopCoordinator:
    number = job.restored.manifest.number if job.restored is not None else 0
    return LoopCoordinator(_policy(job), job.recipe.loop.exchanges, _leases(job), number)


def answer_coordinator(job: Job) -> AnswerCoordinator:
    assert isinstance(job.task, PredictionTask)
    found = Answers(job.directory, job.task.format).found()
    return AnswerCoordinator(_policy(job), Leases.besides(found, job.task.examples, job.task.batch_size), found)


def has_deputy(job: Job) -> bool:
    """The run's coordinator, on another machine, if there is one. What scripts say goes through the first."""
    return job.site is not None and job.plan.settings.copies > 1 and not job.scripted


def _leases(job: Job) -> Leases:
    limits, batch_size = job.plan.limits(), job.task.batch_size
    if job.restored is None:
        return Leases(job.task.examples, batch_size, limits)
    manifest = job.restored.manifest
    progress = [(int(lease), upto) for lease, upto in manifest.progress.items()]
    return Leases.restore(manifest.ledger, progress, batch_size, limits)


def batch_coordinator(job: Job) -> BatchCoordinator:
    method, examples = job.recipe.work, job.task.examples
    assert isinstance(method, BatchMethod)
    size = method.size(job.task.batch_size, examples, job.recipe.replicas)
    balance = Balance(size, method.push_every, method.backup)
    batch = method.batch(examples) if method.examples is not None else None
    work = BatchWork(method.rules, examples, batch, balance, job.plan.limits())
    if job.restored is None:
        return BatchCoordinator(_policy(job), work)
    manifest = job.restored.manifest
    state = msgspec.convert(manifest.ledger["method"], MethodState)
    return BatchCoordinator(_policy(job), work, state, _trained(job, manifest), manifest.number)


def _policy(job: Job) -> Policy:
    succeeds = job.plan.settings.launcher != "inline"
    policy = msgspec.structs.replace(job.plan.policy(job.task), save_within_s=job.save_within_s, succeeds=succeeds)
    if job.by_itself:  # it may be lost again soon, and goes on from a newer one then
        policy = msgspec.structs.replace(policy, snapshot_first_s=job.save_within_s / 2)
    if job.site is not None:
        rooms = job.site.rooms(job.plan.threads, job.plan.settings.parts)
        goes_back = job.plan.settings.restarts > 0
        policy = msgspec.structs.replace(
            policy, rooms=rooms, pulse=job.site.pulse, goes_back=goes_back, deputy=has_deputy(job)
        )
    so_far = best.kept(job.directory) if policy.goal.keep and job.restored is not None else None
    if so_far is not None and so_far.metric == policy.goal.metric:
        policy = msgspec.structs.replace(policy, goal=msgspec.structs.replace(policy.goal, best=so_far.value))
    if policy.seconds is None or job.restored is None:
        return policy
    left_s = policy.seconds - job.restored.manifest.trained_s  # a total, as epochs and steps are
    return msgspec.structs.replace(policy, seconds=max(0.0, left_s))


def begun(job: Job) -> tuple[int, int]:
    """How many updates and examples shards have applied when they begin.

    In a resumed run every shard counts on from the same two numbers: the newest version that a shard had, and the
    examples of the shard that had fewest.
    """
    if job.restored is None:
        return 0, 0
    told = job.restored.manifest.examples
    return job.restored.updates, _trained(job, job.restored.manifest) if told is UNSET else min(told)


def _trained(job: Job, manifest: Manifest) -> int:
    """Examples that are trained by the ledger, which also counts those that scripts have left out."""
    if isinstance(job.recipe.work, BatchMethod):
        return msgspec.convert(manifest.ledger["trained"], int)
    return _leases(job).trained


def left_out(job: Job) -> int:
    """Examples that the data position of a resumed run is ahead of those in its weights: scripts have skipped them."""
    if job.restored is None or isinstance(job.recipe.work, BatchMethod):
        return 0
    return _leases(job).trained - begun(job)[1]
