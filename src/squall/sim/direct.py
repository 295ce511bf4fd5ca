"""Machines on wires that lose, repeat and reorder nothing: links would have nothing to do, and are left out."""

from __future__ import annotations

from squall.protocol.core import Effect, End, Event, Forget, Machine, MessageArrived, Node


class Direct:
    """Stands where `link.Linked` does, at half its cost; the world carries its `Send` effects as they are."""

    unacknowledged = 0

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._forgotten: dict[Node, None] = {}
        self._ended = False

    @property
    def wake_at(self) -> float | None:
        return None if self._ended else self.machine.wake_at

    def on(self, event: Event, now: float) -> list[Effect]:
        if self._ended or (type(event) is MessageArrived and event.sender in self._forgotten):
            return []
        effects = self.machine.on(event, now)
        for effect in effects:
            if type(effect) is Forget:
                self._forgotten[effect.node] = None
            elif type(effect) is End:
                self._ended = True
        return effects
