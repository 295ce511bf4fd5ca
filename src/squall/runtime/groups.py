"""torch's process groups between processes that have agreed on who belongs to one; a group ends when one of them dies.

Gloo tells of a death only those who wait for the dead process itself; others wait for each other until a timeout. So
whoever has the error shuts all of the group's connections (`Group.cut`), and whoever waits for him has it next.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import distributed_c10d as c10d

FORM_WITHIN_S = 5.0  # a member that died meanwhile is waited for so long


class Group:
    """Of this process and others, which all name the same `members` in the same order and a new `name`.

    Raises `RuntimeError` where one of them does not come.
    """

    def __init__(self, name: str, directory: Path, members: Sequence[int], own: int, backend: str = "gloo") -> None:
        """`own` is this process's place in `members`; `directory` belongs to the user alone, on a disk of them all."""
        self.members, self.own = tuple(members), own
        before = _sockets()
        store = FileStore(str(directory / f"group-{name}"), len(members))
        self.torch, _ = c10d._new_process_group_helper(
            len(members), own, [], dist.Backend(backend), store, group_name=c10d.GroupName(name),
            timeout=timedelta(seconds=FORM_WITHIN_S),
        )  # fmt: skip
        c10d._world.pg_group_ranks[self.torch] = {rank: rank for rank in range(len(members))}
        self._sockets = [entry for entry in _sockets() if entry not in before]

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


def _sockets() -> set[tuple[int, int]]:
    """This process's sockets: descriptor, and inode."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found
