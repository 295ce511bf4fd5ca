"""Where each node begins in a replay that begins at a snapshot. `runtime.replay_starts` says what is kept for it."""

from __future__ import annotations

import math
from pathlib import Path

from squall.protocol.effects import UseWeights
from squall.protocol.nodes import Node
from squall.replaying.replayed_nodes import ReplayedReplica, ReplayedShard
from squall.runtime.job import Job
from squall.runtime.records import Computed, NextFile, Pushed
from squall.runtime.replay_starts import cuts_at, fetches_before, read_push
from squall.runtime.schedule import Damaged


def begun_at(
    snapshot: int, attempt: Path, job: Job, updates: int, replicas: dict[Node, ReplayedReplica]
) -> list[ReplayedShard]:  # fmt: skip
    """The shards as they were at a snapshot, with every replica at its cut.

    Replicas that have left nothing but pushes are added. Raises `Damaged` where the replay cannot begin there.
    """
    cuts = cuts_at(attempt, snapshot, job.recipe.shards)
    shards = [ReplayedShard(attempt, job, index, updates, snapshot) for index in range(job.recipe.shards)]
    for shard, cut in zip(shards, cuts):
        if shard.broken:
            raise Damaged(shard.damage)
        shard.take_up(cut)
    for node in sorted({node for shard in shards for node in shard.clocks} - replicas.keys()):
        replicas[node] = ReplayedReplica(node, (), job)
    for replica in replicas.values():
        _skip(replica, fetches_before(cuts, replica.node))
        if replica.broken:
            raise Damaged(replica.damage)
    for shard in shards:
        for replica in replicas.values():
            for clock in shard.clocks.get(replica.node, ()):
                if clock <= replica.given:
                    read_push(shard.kept(replica.node, clock))  # raises where it is not there as it was
    return shards


def _skip(replica: ReplayedReplica, fetches: int) -> None:
    """Skip the replica's records before its cut, which is at this fetch."""
    replica.begin_before(fetches)
    held, records = 0, replica.whole()
    for record in records:
        if isinstance(record, UseWeights) and replica.used == fetches:
            break
        match record:
            case NextFile(before, used):
                replica.clock, replica.used = before, used
                if used > fetches:
                    raise Damaged(f"{replica.paths[0]} begins behind it")
            case UseWeights():
                replica.used += 1
            case Pushed():
                replica.clock, held = record.clock, 0
            case Computed():
                held += record.finite
        replica.skipped += 1
    else:
        replica.given = math.inf  # its records end before the cut
        return
    replica.begins, replica.given = replica.used, replica.clock
    if held:  # the next push has batches from before
        replica.given = next((record.clock for record in records if isinstance(record, Pushed)), math.inf)
    for _ in records:  # reading on sets `broken` where a later part is missing
        pass
