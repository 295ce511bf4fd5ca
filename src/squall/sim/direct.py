"""Machines on wires that lose, repeat and reorder nothing: links would have nothing to do, and are left out."""

from __future__ import annotations

from squall.protocol.core import Effect, Event, Machine, MessageArrived, Node


class Direct:
    """Stands where `link.Linked` does, at half its cost; the world carries the machine's `Send` effects as they are."""

    unacknowledged = 0

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.wake_at = machine.wake_at
        self._forgotten: dict[Node, None] = {}

    def on(self, event: Event, now: float) -> list[Effect]:
        if self._forgotten and type(event) is MessageArrived and event.sender in self._forgotten:
            return []
        effects = self.machine.on(event, now)
        self.wake_at = self.machine.wake_at
        return effects

    def forget(self, node: Node) -> None:
        """What is still on its way from this node is not heard."""
        self._forgotten[node] = None
