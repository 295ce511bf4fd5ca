"""What connections ask of the process that they belong to."""

from __future__ import annotations

from typing import Protocol

from squall.protocol.effects import Payload
from squall.protocol.frames import Message
from squall.protocol.nodes import Node
from squall.transports.stream import Views


class Part(Protocol):
    """What a process's part in the run is, as far as its connections go."""

    @property
    def every_s(self) -> float: ...  # between reports of who was heard

    def places(self, payload: Payload, peer: Node, /) -> Views:
        """Where numbers lie that a peer sends or gets. Raises `ValueError`: it has no part in them."""

    def check(self, sender: Node, message: Message | None, payload: Payload | None) -> None:
        """Raises `ValueError` for what this sender never says."""

    def admit(self, node: Node, machine: int, address: str, /) -> tuple[str, int] | None:
        """The process is on that machine. Returns where it is called there, if that is said. Raises `ValueError`."""

    def has(self, node: Node) -> bool:
        """The process is on this machine."""

    def vouches(self, authority: str, node: Node) -> bool:
        """Whether an authority, by its name, may name that process."""

    def reports(self, node: Node) -> bool:
        """Whether the coordinator wants to know that the node was heard."""
