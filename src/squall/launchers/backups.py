"""The backups of shards on a nursery's machine: what each keeps for the shard that may take over there."""

from __future__ import annotations

from collections.abc import Collection

from squall.protocol.events import ProcessEnded
from squall.protocol.nodes import COORDINATOR, Node
from squall.runtime.job import Job
from squall.runtime.legacy import Legacy
from squall.transports.opening import listening


def succeeded(job: Job) -> list[Node]:
    """Whose sockets a nursery keeps: of those that others call, and who goes on in their place would listen there."""
    shards = (Node("shard", index) for index in job.legacies)
    return [COORDINATOR, *shards, *(_kept_for(backup) for backup in job.backups)]


def prepare(job: Job, node: Node, ends: Node | None, here: Collection[Node]) -> None:
    """For a process that is to be forked where these are `here`, and a shard in the place of the backup that `ends`.

    Raises `OSError` where there is no room for a backup, or what it had kept is gone.
    """
    if node.role == "backup":
        _begin(job, node, here)
    elif ends is not None:
        _take_over(job, node, ends)


def _begin(job: Job, backup: Node, here: Collection[Node]) -> None:
    """It has nothing at first. If it takes over, its shard is called on this machine."""
    start, stop = job.layout.shard_range(backup.index, job.recipe.shards)
    for older in [node for node in job.backups if node.index == backup.index and node not in here]:
        del job.backups[older]
    beside = Node("shard", backup.index) in here
    job.backups[backup] = Legacy(stop - start, apart=beside)
    if not beside:
        job.arena.reserve_range(start, stop, job.recipe.replicas + (job.task.validate is not None))
    if job.site is not None and _kept_for(backup) not in job.site.listeners:
        job.site.listeners[_kept_for(backup)] = listening()


def _take_over(job: Job, shard: Node, backup: Node) -> None:
    if backup not in job.backups:
        raise OSError(f"what {backup} had kept is gone")
    job.legacies[shard.index] = job.backups.pop(backup)
    job.legacies[shard.index].backed = True
    if job.site is not None:
        if (older := job.site.listeners.pop(shard, None)) is not None:
            older.close()
        job.site.listeners[shard] = job.site.listeners.pop(_kept_for(backup))


def ended(job: Job, node: Node, why: str) -> ProcessEnded:
    """A process that has ended without having been told to."""
    legacy = job.legacies.get(node.index) if node.role == "shard" else None
    return ProcessEnded(node, why, legacy is not None and legacy.numbers.torn)


def _kept_for(backup: Node) -> Node:
    """Under which the socket is kept where its shard is called if it takes over: that of any backup."""
    return Node("backup", backup.index)
