"""Backups on a nursery's machine, of shards and of the coordinator: what each keeps for who may go on there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from squall.protocol.events import ProcessEnded
from squall.protocol.nodes import COORDINATOR, DEPUTY, Node
from squall.runtime.deputing import Kept
from squall.runtime.job import Job
from squall.runtime.journal import Journal
from squall.runtime.legacy import shared_memory
from squall.runtime.lock import sign, take
from squall.runtime.machines import COORDINATOR_BYTES, legacy_of
from squall.transports.opening import listening

DIRECTORIES_AT_MOST = 100  # of one run on a machine


def succeeded(job: Job) -> list[Node]:
    """Whose sockets a nursery keeps: of those that others call, and who goes on in their place would listen there."""
    shards = (Node("shard", index) for index in job.legacies)
    return [COORDINATOR, DEPUTY, *shards, *(_kept_for(backup) for backup in job.backups)]


def prepare(job: Job, node: Node, ends: Node | None, here: Collection[Node]) -> Job:
    """For a process that is to be forked where these are `here`, in the place of the backup or deputy that `ends`.

    Returns the job of all processes from now on. Raises `OSError` where there is no room, or what was kept is gone.
    """
    if node.role == "backup":
        _begin(job, node, here)
    elif node.role == "deputy":
        _begin_deputy(job, node)
    elif ends is not None and node == COORDINATOR:
        return _lead(job, ends)
    elif node == COORDINATOR and job.journal is None and job.site is not None and not job.site.has(COORDINATOR):
        raise OSError("nobody has left what a coordinator needs to go on here")
    elif ends is not None:
        _take_over(job, node, ends)
    return job


def _begin_deputy(job: Job, deputy: Node) -> None:
    """It has nothing at first. If it leads, the run's directory is what it keeps from now on."""
    assert job.site is not None
    remove_unused(job)
    directory = _new_directory(job.directory.name, job.site.machine)
    try:
        lock = take(directory, None)  # held by all that are forked from here
    except ValueError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise OSError(str(error)) from None
    job.deputies[deputy] = Kept(Journal(shared_memory(Journal.size(COORDINATOR_BYTES))), directory, lock)
    job.site.pieces.outlive(max(job.recipe.shards, job.recipe.replicas), 4 * job.layout.length)
    if DEPUTY not in job.site.listeners:
        job.site.listeners[DEPUTY] = listening()


def _new_directory(run: str, machine: int) -> Path:
    """Where the user of this machine finds the run, if it goes on from here; what is there of another is left alone."""
    for name in ("", *(f"-{number}" for number in range(2, DIRECTORIES_AT_MOST + 1))):
        path = Path("runs", f"{run}.machine-{machine}{name}").absolute()
        with suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True)
            return path
    raise OSError(f"there are {DIRECTORIES_AT_MOST} directories like {path} already: remove some")


def _lead(job: Job, deputy: Node) -> Job:
    if deputy not in job.deputies:
        raise OSError(f"what {deputy} had kept is gone")
    assert job.site is not None
    kept = job.deputies.pop(deputy)
    sign(kept.lock, os.getppid())
    listener = job.site.listeners[COORDINATOR] = job.site.listeners.pop(DEPUTY)
    job.site.moved(COORDINATOR, job.site.machine, ("localhost", listener.getsockname()[1]))
    return replace(job, journal=kept.journal, directory=kept.directory)


def remove_unused(job: Job) -> None:
    """What deputies have kept here, of whom nobody goes on."""
    for deputy in list(job.deputies):
        remove(job, deputy)


def remove(job: Job, deputy: Node) -> None:
    """What it has kept here, unless somebody has gone on from that."""
    if (kept := job.deputies.pop(deputy, None)) is not None:
        shutil.rmtree(kept.directory, ignore_errors=True)
        os.close(kept.lock)


def _begin(job: Job, backup: Node, here: Collection[Node]) -> None:
    """It has nothing at first. If it takes over, its shard is called on this machine."""
    start, stop = job.layout.shard_range(backup.index, job.recipe.shards)
    for older in [node for node in job.backups if node.index == backup.index and node not in here]:
        del job.backups[older]
    beside = Node("shard", backup.index) in here
    job.backups[backup] = legacy_of(job, stop - start, apart=beside)
    if not beside:
        job.arena.reserve_range(start, stop, job.recipe.replicas + (job.task.validate is not None))
    if job.site is not None and _kept_for(backup) not in job.site.listeners:
        job.site.listeners[_kept_for(backup)] = listening()


def _take_over(job: Job, shard: Node, backup: Node) -> None:
    if backup not in job.backups or not job.backups[backup].journal.begun:
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
