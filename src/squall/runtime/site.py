"""One machine's part of a run on several."""

from __future__ import annotations

import socket
from collections.abc import Collection
from dataclasses import dataclass, field

from squall.protocol.heartbeats import Pulse
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.placing import places_taken
from squall.protocol.policy import MachineRoom
from squall.record.inventory import Inventory
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
        cores: of each machine, which a run may use.
        pulse: how often machines are heard, and when one is taken for lost.
        inventory: of all machines, for the record; on the coordinator's machine alone.
        pieces: of snapshots, on their way to the coordinator's machine.
        plaintext: the network is encrypted already, so that what goes between machines is not.
        host: where others reach this machine; empty on the coordinator's, which each reaches in its own way.
    """

    machine: int
    seats: Seats
    addresses: dict[Node, Address]
    identity: Identity
    listeners: dict[Node, socket.socket]
    cores: dict[int, int]
    pulse: Pulse
    inventory: Inventory = field(default_factory=Inventory)
    pieces: Pieces = field(default_factory=Pieces)
    plaintext: bool = False
    host: str = ""

    def close_listeners(self, keep: Collection[Node] = ()) -> None:
        """In a process that needs none but those: who calls one that is dead must not be left waiting."""
        for node, listener in self.listeners.items():
            if node not in keep:
                listener.close()

    def address(self, listener: socket.socket) -> str:
        """Where others call a socket of this machine; it is turned back by `called`."""
        return f"{self.host}:{listener.getsockname()[1]}"

    def called(self, address: str) -> Address:
        """Where a process is called that has said so; one of machine 0 where this machine reaches the coordinator.

        Raises `ValueError` for what is no address.
        """
        host, _, port = address.rpartition(":")
        return host or self.addresses[COORDINATOR][0], int(port)

    def moved(self, node: Node, machine: int, address: Address) -> None:
        """The process is there now, for all that begin on this machine from now on."""
        self.seats[node.role, node.index] = machine
        self.addresses[node] = address

    def has(self, node: Node) -> bool:
        """The process begins on this machine."""
        return self.seats.get((node.role, node.index)) == self.machine

    def rooms(self, threads: int, parts: int) -> tuple[MachineRoom, ...]:
        """All machines with what begins there, and for how many parts of so many threads their cores are enough."""
        on = {Node(*process): at for process, at in self.seats.items() if Node(*process) != COORDINATOR}
        rooms = []
        for machine, cores in self.cores.items():
            there = tuple(node for node, at in on.items() if at == machine)
            placed = sum(places_taken(node, on, parts) for node in there)
            rooms.append(MachineRoom(machine, max(placed, cores // threads), there))
        return tuple(rooms)
