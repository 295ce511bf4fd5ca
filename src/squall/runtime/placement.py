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


def place(recipe: Recipe, machines: Sequence[Room], at_most: int | None = None) -> Seats:
    """Replicas are spread over the cores of all machines that may have them, shards over those with the fewest.

    The coordinator is on the first machine that may have it, where the run's directory is, and so is the evaluator if
    it may. Of the replicas `at_most` so many are placed. Raises `ValueError` where none may have a role.
    """
    seats: Seats = {}
    crowd = [0.0] * len(machines)  # processes a core

    def spread(role: str, indices: range, crowd: list[float]) -> None:
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

    spread("replica", range(min(recipe.replicas, at_most or recipe.replicas)), crowd)
    spread("shard", range(recipe.shards), crowd)
    order = [float(i) for i in range(len(machines))]
    spread("coordinator", range(1), order)
    order[seats["coordinator", 0]] = -1.0
    spread("evaluator", range(recipe.replicas, recipe.replicas + 1), order)
    return seats
