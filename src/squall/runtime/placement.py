"""Which machine each process of a run is on: of a real run, and of one in a simulated cluster."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import Protocol

from squall.strategies import Recipe

Seats = dict[tuple[str, int], int]  # (role, index) of a process -> number of its machine


class Room(Protocol):
    """What a machine has."""

    @property
    def cores(self) -> int: ...

    @property
    def roles(self) -> Collection[str]: ...  # what may be placed there


def place(recipe: Recipe, machines: Sequence[Room]) -> Seats:
    """Replicas are spread over the cores of all machines that may have them, shards over those with the fewest.

    The coordinator is on the first machine that may have it. Raises `ValueError` where none may have a role.
    """
    seats: Seats = {}
    crowd = [0.0] * len(machines)  # processes a core

    def spread(role: str, indices: range) -> None:
        """The least crowded first; those of equal crowd in their order."""
        able = [(crowd[i], i) for i, machine in enumerate(machines) if role in machine.roles]
        if not able:
            raise ValueError(f"no machine has room for a {role}")
        heapq.heapify(able)
        for index in indices:
            _, i = able[0]
            seats[role, index] = i
            if role in ("replica", "shard"):  # the others hardly compute
                crowd[i] += 1 / machines[i].cores
            heapq.heapreplace(able, (crowd[i], i))

    spread("replica", range(recipe.replicas))
    spread("shard", range(recipe.shards))
    seats["coordinator", 0] = next(i for i, machine in enumerate(machines) if "coordinator" in machine.roles)
    spread("evaluator", range(recipe.replicas, recipe.replicas + 1))
    return seats
