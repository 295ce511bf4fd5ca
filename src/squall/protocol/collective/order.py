"""In which order the members of a group count.

Where they divide the optimizer's state, each has its own share and that of the one before. So neighbours are on
different machines as far as can be, the first and the last too: a machine with up to half of the members takes no share
with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from squall.protocol.nodes import Node


def spread(machines: Sequence[int]) -> list[int]:
    """Numbers of the members, in their order, where these are the machines that they are on."""
    size = Counter(machines)
    together = sorted(range(len(machines)), key=lambda member: (-size[machines[member]], machines[member], member))
    places = [*range(0, len(machines), 2), *range(1, len(machines), 2)]
    found = [0] * len(machines)
    for place, member in zip(places, together):
        found[place] = member
    return found


def strangers(order: Sequence[Node], some: Collection[Node]) -> list[Node]:
    """Some of those in an order, without neighbours among them, from the first on."""
    found: list[int] = []
    for place in [place for place, node in enumerate(order) if node in some]:
        if not any((place - other) % len(order) in (1, len(order) - 1) for other in found):
            found.append(place)
    return [order[place] for place in found]
