"""A process that a nursery has forked."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from squall.protocol.nodes import Node
from squall.protocol.nursery_messages import Placed
from squall.runtime.processes import killed_first


@dataclass
class Child:
    node: Node
    pid: int
    handle: int  # a pidfd: readable when the process has ended
    turn: int  # of a replica, in which it takes a GPU
    ordered: bool = False  # the coordinator wants its end, or it hangs
    why: str = ""  # of that
    told: Placed | None = None  # where the coordinator is, if that has moved

    @classmethod
    def watched(cls, node: Node, pid: int, turn: int) -> Child:
        """Raises `OSError` where it cannot be, and so must not live."""
        try:
            return cls(node, pid, os.pidfd_open(pid), turn)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def kill(self) -> None:
        signal.pidfd_send_signal(self.handle, signal.SIGKILL)


def expose(node: Node) -> None:
    """In a child, which is that node: where memory runs out it dies before those whose loss costs more."""
    if node.role not in ("coordinator", "deputy", "shard", "backup"):
        killed_first()
