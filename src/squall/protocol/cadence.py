"""What of a strategy a replica must know."""

from __future__ import annotations

import msgspec


class Cadence(msgspec.Struct, frozen=True):
    """When it exchanges, and what it waits for."""

    push_every: int = 1  # batches
    fetch_every: int = 1  # batches
    overlap: bool = False
    gathered: bool = False  # pushes are gathered into rounds, one grant each
    answered: bool = False  # others wait for this replica's exchanges: without data it takes part with nothing
    local: bool = False  # the replica moves its own weights with an optimizer of its own
