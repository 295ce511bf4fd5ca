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

from squall.launchers.leaving import DONE, RAISED, leave
from squall.parts.host import Watch, follow
from squall.parts.neighbours import SPEAKER, NeighbourLost, Neighbours
from squall.protocol.nodes import Node
from squall.runtime.groups import Group
from squall.runtime.job import Job
from squall.runtime.kinds import host
from squall.runtime.processes import fork, keep_freed_memory
from squall.usercode.blame import encode, note

LOST = 72  # exit status of a first part, of whose fellows one was killed


def first_part(job: Job, node: Node, sockets: Path) -> tuple[Job, Neighbours, Watch]:
    """Fork the others; the job as this part has it, the way to them, and what tells when one of them ends."""
    _folder(sockets, node).mkdir(mode=0o700)
    if job.recipe.work.local is not None:
        job = replace(job, own=torch.frombuffer(mmap(-1, 4 * job.layout.length), dtype=torch.float32))
    others = []
    for part in range(1, job.plan.settings.parts):
        if pid := fork():
            others.append(pid)
        else:
            _follow(job, node, sockets, part)
    return *_joined(job, node, sockets, SPEAKER, others), Watch(others)


def traceback_file(sockets: Path, node: Node) -> Path:
    """Where a process writes what it has raised, for the nursery."""
    return sockets / f"{node}.traceback"


def die_of(lost: NeighbourLost, node: Node, sockets: Path) -> NoReturn:
    """End as the part did that is gone: one that has raised told the nursery what."""
    with suppress(ChildProcessError):
        while True:  # the group is cut, so all others end
            os.wait()
    leave(RAISED if traceback_file(sockets, node).exists() else LOST)


def _folder(sockets: Path, node: Node) -> Path:
    return sockets / f"parts-{node}"


def _joined(job: Job, node: Node, sockets: Path, part: int, others: Sequence[int] = ()) -> tuple[Job, Neighbours]:
    """`others`: pids that part 0 has to watch; the kernel ends them with it."""
    from squall.parts.inside import inside  # which imports torch's compiler

    parts = job.plan.settings.parts
    pids = [os.getpid(), *(others or [os.getpid()] * (parts - 1))]
    neighbours = Neighbours(Group(str(node), _folder(sockets, node), pids, part), part, parts)
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
        follow(host(job, node), neighbours)
        status = DONE
    except NeighbourLost:
        status = LOST  # that one knows why
    except BaseException as error:
        note(error, f"in part {part} of replica {node.index}", role="replica", index=node.index)
        traceback_file(sockets, node).write_text(encode(error))
    finally:  # it never returns into what the first part goes on with
        leave(status)
