"""One machine's part of a run on several."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from squall.protocol.nodes import Node
from squall.runtime.pieces import Pieces
from squall.runtime.placement import Seats
from squall.transports.certificates import Identity
from squall.transports.streams import Address


@dataclass(frozen=True)
class Site:
    """What the processes of a machine know of the run's other machines.

    Attributes:
        machine: its own number; the coordinator is on machine 0.
        seats: where all processes of the run begin.
        addresses: of the coordinator and the shards.
        identity: of this machine, an authority for its processes.
        listeners: the bound sockets of those that are on this machine.
        pieces: of snapshots, on their way to the coordinator's machine.
    """

    machine: int
    seats: Seats
    addresses: dict[Node, Address]
    identity: Identity
    listeners: dict[Node, socket.socket]
    pieces: Pieces = field(default_factory=Pieces)

    def has(self, node: Node) -> bool:
        """The process begins on this machine."""
        return self.seats[node.role, node.index] == self.machine
