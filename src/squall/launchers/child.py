"""A process that a nursery has forked."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

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


def turn(node: Node, others: Iterable[Child]) -> int:
    """The first that no other replica has here; the evaluator's is the last GPU, which has fewest of them."""
    taken = {child.turn for child in others if child.node.role == "replica"}
    return next(free for free in count() if free not in taken) if node.role == "replica" else -1


def expose(node: Node) -> None:
    """In a child, which is that node: where memory runs out it dies before those whose loss costs more."""
    if node.role not in ("coordinator", "deputy", "shard", "backup"):
        killed_first()
