"""Who of a group has the optimizer's state of which parameters.

Parameters are numbered as in the layout, and shares are runs of them, about equal in elements. Member i steps on share
i, and on the one before it as well: everybody has all reduced gradients anyway, so the second copy costs no message.
Both make the same operations on the same numbers, so the copies are alike to the last bit. When a group forms, whoever
lacks the state of what is its own now gets it from the first who has it.

Nobody takes the next step before all have gathered the weights of this one. So of those who come to a new group some
may be one step behind at most, and then the others still have the gradients of that step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import accumulate, groupby


class ShareLost(RuntimeError):
    """Nobody has the state of some parameters."""


def bounds_of(sizes: Sequence[int], members: int) -> list[int]:
    """The first parameter of each share, and behind the last one their number; no share is empty.

    `sizes`: elements of each parameter, of which there are as many as members at least.
    """
    ends, bounds = list(accumulate(sizes)), [0]
    for share in range(1, members):
        wanted, least, most = ends[-1] * share / members, bounds[-1] + 1, len(sizes) - members + share
        bounds.append(min(range(least, most + 1), key=lambda cut: abs(ends[cut - 1] - wanted)))
    return [*bounds, len(sizes)]


def held_by(member: int, bounds: Sequence[int]) -> set[int]:
    """The parameters whose state a member has: its own share, and the one before."""
    members = len(bounds) - 1
    return {p for share in (member, (member - 1) % members) for p in range(bounds[share], bounds[share + 1])}


def givers(held: Sequence[Set[int]], parameters: int) -> list[int]:
    """For each parameter the first member that has its state. Raises `ShareLost`."""
    found = [next((member for member, has in enumerate(held) if p in has), -1) for p in range(parameters)]
    if -1 in found:
        raise ShareLost(f"the optimizer's state of {found.count(-1)} parameters is lost")
    return found


def runs(givers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(giver, first, stop) of parameters next to each other that come from the same member."""
    at = 0
    for giver, same in groupby(givers):
        first, at = at, at + len(list(same))
        yield giver, first, at


def has(held: Set[int], clock: int, wanted: int, formed: bool) -> Set[int]:
    """Of the state that somebody holds, what counts in a group of round `wanted`.

    Who has been in a group and is one round behind makes that step with the others' gradients. A newcomer has the state
    that the run began with, for all parameters.
    """
    return held if clock == wanted or (formed and clock == wanted - 1) else set()
