"""A process's part in a run on several machines: whom it believes what, and where numbers lie."""

from __future__ import annotations

import math
from collections.abc import Callable

from squall.protocol.effects import Payload
from squall.protocol.frames import Message
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.speaking import Says, places_of
from squall.runtime.site import Site
from squall.transports.certificates import machine_name
from squall.transports.stream import Views

OFTEN_S = 0.5
Places = Callable[[Payload, Node], Views]


class Part:
    """Of the process `node`; its connections (`transports.streams.Streams`) ask it."""

    def __init__(self, node: Node, site: Site, says: Says, places: Places) -> None:
        """`places` raises `ValueError` for numbers that the process and a peer do not exchange."""
        self.places = places
        often_s = OFTEN_S if node == COORDINATOR else math.inf  # it tells itself
        self.every_s = min(site.pulse.every_s, often_s)  # between reports of who was heard
        self._node = node
        self._says = says
        self._machines = {Node(role, index): at for (role, index), at in site.seats.items()}
        self._own = site.machine
        self._called = site.called

    def admit(self, node: Node, machine: int, address: str = "") -> tuple[str, int] | None:
        """The process is on that machine, and may call, or is called at the address."""
        self._machines[node] = machine
        return self._called(address) if address else None

    def has(self, node: Node) -> bool:
        return self._machines.get(node) == self._own

    def vouches(self, authority: str, node: Node) -> bool:
        """Whether an authority, by its name, is that of the machine which has this process."""
        nursery = Node("nursery", node.index)
        machines = {node.index if node == nursery else self._machines.get(node)}
        if node == COORDINATOR:
            machines |= {at for deputy, at in self._machines.items() if deputy.role == "deputy"}
        return authority in {machine_name(machine) for machine in machines if machine is not None}

    def reports(self, node: Node) -> bool:
        """Whether the coordinator wants to know that the node was heard, as one on a machine that may be lost."""
        if self._node.role in ("part", "nursery"):  # which have no way to tell
            return False
        return self._machines.get(node, node.index) not in (self._own, self._machines[COORDINATOR])

    def check(self, sender: Node, message: Message | None, payload: Payload | None) -> None:
        """Raises `ValueError` for what this sender cannot mean, whatever has happened before."""
        for place in places_of(self._says, sender, self._node, message, payload):
            self.places(place, sender)
