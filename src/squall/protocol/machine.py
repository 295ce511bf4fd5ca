"""What a protocol machine is.

A machine is an object with `on(event, now) -> list[Effect]`. It holds all protocol state and touches nothing:
no socket, file, clock, thread or randomness (ruff's TID251 enforces it for this package). A shell feeds events
and carries out effects; the shells are the real driver (`runtime.driver`) and the virtual-time world
(`runtime.world`), which also serves as the inline driver.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from squall.protocol.effects import Effect
from squall.protocol.events import Event
from squall.protocol.nodes import Node


class Refusal(Exception):
    """A machine is given a message that its sender never says then; nothing has changed by it.

    It is the sender that the run goes on without (`protocol.link`), so nothing is refused that others could have made
    it say. What a machine does wrong itself is an `AssertionError`.
    """

    def __init__(self, why: str, of: Node | None = None) -> None:
        """`of`: who has said it, where the message at hand is another's, for which that had to wait."""
        super().__init__(why)
        self.of = of


class Machine(Protocol):
    """A protocol state machine."""

    @property
    def node(self) -> Node: ...

    @property
    def wake_at(self) -> float | None:
        """When `TimePassed` is wanted, on the shell's clock in seconds; None when nothing is waited for."""

    def on(self, event: Event, now: float) -> list[Effect]:
        """Take an event, change state, and say what must be done, in order. Raises `Refusal`."""


@runtime_checkable
class Awaiting(Protocol):
    """A machine that knows whom it waits for; people are told."""

    @property
    def held(self) -> bool:
        """Until something comes it cannot go on, or others cannot; else it rests."""

    def awaits(self) -> Node | None:
        """From whom that has to come; None where nobody can say. Asked where it is `held`, and seldom."""
