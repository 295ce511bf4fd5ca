"""The processes of a run, by name."""

from __future__ import annotations

from functools import cache
from ipaddress import ip_address

import msgspec


class Node(msgspec.Struct, frozen=True, order=True, gc=False, cache_hash=True):
    """A process of a run. A replacement is a new node (next incarnation) with the same index.

    The index of a replica is its slot in the arena; the evaluator's slot, and index, comes after theirs. That of a
    nursery is its machine's number. A part is a process of a replica that lies on several machines (`part_nodes`).
    A backup is of the shard that has its index. The deputy is the coordinator's.
    """

    role: str  # "coordinator" | "deputy" | "shard" | "backup" | "replica" | "part" | "evaluator" | "nursery"
    index: int = 0
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.role}-{self.index}.{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> Node:
        role, _, rest = text.partition("-")
        index, _, incarnation = rest.partition(".")
        return cls(role, int(index), int(incarnation))


COORDINATOR = Node("coordinator")
DEPUTY = Node("deputy")  # the first
NURSERY = Node("nursery")  # of the machine where the coordinator begins, whose number is 0


@cache
def replica_node(slot: int, incarnation: int) -> Node:
    """One object for all who ask: looked up among thousands, the same object is found without being compared.

    There is no default for the incarnation: `cache` would keep a second object for those who leave it out.
    """
    return Node("replica", slot, incarnation)


def part_nodes(replica: Node, parts: int) -> tuple[Node, ...]:
    """The other processes of a replica that lies on several machines, which is its first part itself."""
    numbers = range(1, parts) if replica.role == "replica" else ()
    return tuple(Node("part", replica.index * parts + part, replica.incarnation) for part in numbers)


def whole(node: Node, parts: int) -> Node:
    """The replica of a part; of any other process the process itself."""
    return replica_node(node.index // parts, node.incarnation) if node.role == "part" else node


def is_address(text: str, near: bool) -> bool:
    """Whether it is an IP address and a port; names are looked up for nobody.

    `near`: it is on the coordinator's machine, which each reaches in its own way, so that the address may be empty.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        return False
    try:
        return near if not host else bool(ip_address(host))
    except ValueError:
        return False


@cache
def shard_nodes(count: int) -> tuple[Node, ...]:
    """One tuple for all who ask."""
    return tuple(Node("shard", index) for index in range(count))
