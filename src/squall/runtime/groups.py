"""torch's process groups: of the parts of a replica, which end together, and of replicas on GPUs.

Gloo tells of a death only those who wait for the dead process itself; others wait for each other until a timeout. So
whoever has the error shuts all of the group's connections (`Group.cut`), and most who wait for him have it next: who is
sending has not, nor has what waits behind an operation that has failed (in `runtime/mesh_group.py` all have). While a
group forms, Gloo waits for a dead process, too: it does so in a thread, which is left alone then, with connections that
nobody shuts. So nobody goes on with a group that others may have left like that: all say that they have it, first.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Lock, Thread

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from squall.transports.near_meeting import COME_WITHIN_S, DIED, NOT_COME, ends_of

LOOK_EVERY_S = 0.005  # whether all have said that they have it
FOR_EVER = timedelta(days=365)  # a member may take any time for a step


class Group:
    """Of this process and others, which all name the same `members` (pids) in the same order and a new `name`.

    Raises `RuntimeError` where one of them does not come, or dies before all are there.
    """

    def __init__(self, name: str, directory: Path, members: Sequence[int], own: int, backend: str = "gloo") -> None:
        """`own` is this process's place in `members`; `directory` belongs to the user alone, on a disk of them all."""
        self.members, self.own = tuple(members), own
        before = _sockets()

        def form() -> ProcessGroup:
            store = FileStore(str(directory / f"group-{name}"), len(members))
            group: ProcessGroup
            group, _ = c10d._new_process_group_helper(
                len(members), own, [], dist.Backend(backend), store, group_name=c10d.GroupName(name),
                timeout=FOR_EVER,  # sends and receipts keep this one, whatever is set later
            )  # fmt: skip
            return group

        with ends_of(members) as handles:
            self.torch = _while_all_live(form, handles)
            c10d._world.pg_group_ranks[self.torch] = {rank: rank for rank in range(len(members))}
            self._sockets = [entry for entry in _sockets() if entry not in before]
            try:
                words = [directory / f"has-{name}-{rank}" for rank in range(len(members))]
                words[own].touch()
                _wait_for(words, handles)
            except BaseException:
                self.close()
                raise
        c10d._set_pg_timeout(FOR_EVER, self.torch)

    def cut(self) -> None:
        """Shut the connections: whoever waits for this process in the group has an error at once."""
        for descriptor, inode in self._sockets:
            with suppress(OSError):  # it was closed meanwhile
                if os.fstat(descriptor).st_ino != inode:
                    continue
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # Gloo dies of a shut one
                        connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Leave the group, whose operations are over or have failed."""
        self.cut()
        dist.destroy_process_group(self.torch)


def _while_all_live(form: Callable[[], ProcessGroup], handles: Sequence[int]) -> ProcessGroup:
    """What `form` comes to. Raises `RuntimeError` as soon as one of the processes has ended, or where none comes."""
    over, ends = os.pipe()
    formed: list[ProcessGroup | Exception] = []
    left, lock = False, Lock()

    def work() -> None:
        found: ProcessGroup | Exception
        try:
            found = form()
        except Exception as error:
            found = error
        with lock:
            formed.append(found)
        os.close(ends)
        if left and isinstance(found, ProcessGroup):
            dist.destroy_process_group(found)

    thread = Thread(target=work, daemon=True)
    thread.start()
    poll = select.poll()
    for handle in (over, *handles):
        poll.register(handle)
    ready = {handle for handle, _ in poll.poll(COME_WITHIN_S * 1000)}
    with lock:  # it may form at this moment
        left = not formed
    os.close(over)
    if left:
        raise RuntimeError(DIED if ready else NOT_COME)
    thread.join()  # at once; till then it has the group as well, whose descriptors would outlive `close`
    if isinstance(formed[0], Exception):
        raise formed[0]
    return formed[0]


def _wait_for(words: Sequence[Path], handles: Sequence[int]) -> None:
    """Until all of these files are there: of a store that has a lock, one that is stopped could hold it."""
    poll, began = select.poll(), time.monotonic()
    for handle in handles:
        poll.register(handle)
    while not all(word.exists() for word in words):
        if poll.poll(LOOK_EVERY_S * 1000):
            raise RuntimeError(DIED)
        if time.monotonic() - began > COME_WITHIN_S:
            raise RuntimeError(NOT_COME)


def _sockets() -> set[tuple[int, int]]:
    """This process's sockets: descriptor, and inode."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found
