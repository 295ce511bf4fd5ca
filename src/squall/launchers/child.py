"""A process that a nursery has forked."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from squall.protocol.nodes import Node


@dataclass
class Child:
    node: Node
    pid: int
    handle: int  # a pidfd: readable when the process has ended
    turn: int  # of a replica, in which it takes a GPU
    ordered: bool = False  # the coordinator wants its end

    def kill(self) -> None:
        signal.pidfd_send_signal(self.handle, signal.SIGKILL)
