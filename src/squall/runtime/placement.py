"""Which machine each process of a run is on: of a real run, and of one in a simulated cluster."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from squall.protocol.nodes import part_nodes, replica_node
from squall.protocol.placing import machines_of
from squall.strategies import Recipe

Seats = dict[tuple[str, int], int]  # (role, index) of a process -> number of its machine


class Room(Protocol):
    """What a machine has."""

    @property
    def cores(self) -> int: ...

    @property
    def roles(self) -> Collection[str]: ...  # what may be placed there


class Parts(NamedTuple):
    """Of each replica."""

    number: int = 1
    spread: bool | None = False  # over as many machines as possible; None: never over two
    threads: int = 1  # of each part


ONE_PART = Parts()


def place(
    recipe: Recipe, machines: Sequence[Room], at_most: int | None = None, parts: Parts = ONE_PART, copies: int = 1
) -> Seats:  # fmt: skip
    """Replicas are spread over the cores of all machines that may have them, shards over those with the fewest.

    A replica of several parts lies on one machine that has cores for all of them, else on as few as possible. Where
    there are more parts than cores all machines are crowded alike. Only parts that lie apart have seats of their own.

    With two `copies` each shard has a backup on another machine, if there is one: where fewest backups are.

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

    count = min(recipe.replicas, at_most or recipe.replicas)
    if parts.number > 1:
        _lay(count, parts, machines, seats, crowd)
    else:
        spread("replica", range(count), crowd)
    spread("shard", range(recipe.shards), crowd)
    order = [float(i) for i in range(len(machines))]
    spread("coordinator", range(1), order)
    order[seats["coordinator", 0]] = -1.0
    spread("evaluator", range(recipe.replicas, recipe.replicas + 1), order)
    if copies > 1:
        _back_up(recipe.shards, machines, seats)
    return seats


def _back_up(shards: int, machines: Sequence[Room], seats: Seats) -> None:
    backups = dict.fromkeys((i for i, machine in enumerate(machines) if "shard" in machine.roles), 0)
    for index in range(shards):
        own = seats["shard", index]
        found = min(backups, key=lambda i: (i == own, backups[i], i))
        seats["backup", index] = found
        backups[found] += 1


def _lay(replicas: int, parts: Parts, machines: Sequence[Room], seats: Seats, crowd: list[float]) -> None:
    """Seats for replicas of several parts, and what they make of the crowd."""
    free = {i: machine.cores // parts.threads for i, machine in enumerate(machines) if "replica" in machine.roles}
    if not free:
        raise ValueError("no machine has room for a replica")
    for slot in range(replicas):
        while not (found := machines_of(free, parts.number, parts.spread)):
            free = {i: room + 1 for i, room in free.items()}
        replica = replica_node(slot, 0)
        for node, i in zip((replica, *part_nodes(replica, parts.number)), found):
            seats[node.role, node.index] = i
        for i in found if len(found) > 1 else found * parts.number:
            free[i] -= 1
            crowd[i] += 1 / machines[i].cores
