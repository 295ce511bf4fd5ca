"""A replica of several processes: the one that the nursery has forked is the first part, and forks the others.

They are one to everybody else. Each dies with the first, and the first with any of them, so that a whole replica takes
their place.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import NoReturn

import torch
from setproctitle import setproctitle
from torch import Tensor

from squall.launchers.leaving import DONE, LOST, RAISED, leave
from squall.parts.host import Watch, follow
from squall.parts.neighbours import SPEAKER, NeighbourLost, Neighbours
from squall.protocol.nodes import Node
from squall.runtime.batches import loader_killed
from squall.runtime.groups import Group
from squall.runtime.job import Job
from squall.runtime.kinds import host
from squall.runtime.processes import fork, keep_freed_memory, never_interrupt
from squall.strategies.work import Collective
from squall.usercode.blame import encode, note


def first_part(job: Job, node: Node, sockets: Path) -> tuple[Job, Neighbours, Watch]:
    """Fork the others; the job as this part has it, the way to them, and what tells when one of them ends."""
    folder(sockets, node).mkdir(mode=0o700)
    job = with_own(job)
    never_interrupt()  # who has woken another part by a write to it, and whose connection Gloo's thread then asks for
    others = []
    for part in range(1, job.plan.settings.parts):
        if pid := fork():
            others.append(pid)
        else:
            _follow(job, node, sockets, part)
    return *_joined(job, node, sockets, SPEAKER, others), Watch(others)


def with_own(job: Job) -> Job:
    """The job with weights that parts share which are forked later, where the replica trains on its own."""
    if job.own is not None:
        return job
    if isinstance(job.recipe.work, Collective):
        return replace(job, own=shared_vector(job).copy_(job.initial))
    return job if job.recipe.work.local is None else replace(job, own=shared_vector(job))


def shared_vector(job: Job) -> Tensor:
    """float32 [length] of zeros, for processes that are forked later."""
    return torch.frombuffer(mmap(-1, 4 * job.layout.length), dtype=torch.float32)


def traceback_file(sockets: Path, node: Node) -> Path:
    """Where a process writes what it has raised, for the nursery."""
    return sockets / f"{node}.traceback"


def tell_raised(sockets: Path, node: Node, story: str) -> None:
    """What a process of this node has raised. Where several parts raise at once, the first is heard, whole."""
    own = sockets / f"{node}.{os.getpid()}.traceback"
    own.write_text(story)
    with suppress(FileExistsError):
        os.link(own, traceback_file(sockets, node))


def raised(sockets: Path, node: Node) -> str:
    """What `tell_raised` was told; empty if nothing was, or its disk was full."""
    try:
        return traceback_file(sockets, node).read_text()
    except OSError:
        return ""


def die_of(lost: NeighbourLost, node: Node, sockets: Path, others: Sequence[int]) -> NoReturn:
    """End as the part did that is gone: one that has raised told the nursery what. `others` are the other parts."""
    for pid in others:  # and no other children, such as those that load data
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)  # the group is cut, so it ends
    leave(RAISED if traceback_file(sockets, node).exists() else LOST)


def folder(sockets: Path, node: Node) -> Path:
    """Of what the parts of a replica need to find each other."""
    return sockets / f"parts-{node}"


def meet(
    job: Job, node: Node, sockets: Path, part: int, others: Sequence[int] = (), tag: int = 0
) -> Neighbours:  # fmt: skip
    """The way to the other parts, which all make theirs. Part 0 has to watch the pids of `others`."""
    parts = job.plan.settings.parts
    pids = [os.getpid(), *(others or [os.getpid()] * (parts - 1))]
    return Neighbours(Group(str(node), folder(sockets, node), pids, part), part, parts, tag)


def _joined(job: Job, node: Node, sockets: Path, part: int, others: Sequence[int] = ()) -> tuple[Job, Neighbours]:
    from squall.parts.inside import inside  # which imports torch's compiler

    neighbours = meet(job, node, sockets, part, others)
    place = inside(job.task, job.layout, job.starts, neighbours, job.device(node.index))
    return replace(job, inside=place), neighbours


def _follow(job: Job, node: Node, sockets: Path, part: int) -> NoReturn:
    status = RAISED
    try:
        setproctitle(f"squall replica {node.index} part {part} of {job.directory.name}")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends a run in order
        torch.set_num_threads(job.plan.threads)
        keep_freed_memory()
        job, neighbours = _joined(job, node, sockets, part)
        follow(host(replace(job, schedule=None), node), neighbours)  # what all perform the first part records
        status = DONE
    except NeighbourLost:
        status = LOST  # that one knows why
    except BaseException as error:
        if loader_killed(error):
            status = LOST
        else:
            note(error, f"in part {part} of replica {node.index}", role="replica", index=node.index)
            tell_raised(sockets, node, encode(error))
    finally:  # it never returns into what the first part goes on with
        leave(status)
