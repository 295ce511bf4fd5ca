"""What runs where, and why: for people, when a run is placed on its machines, and in its report."""

from __future__ import annotations

from collections.abc import Sequence

from squall.record.inventory import Inventory
from squall.runtime.placement import ONE_PART, Parts, Seats

WHY = "replicas by cores or GPUs, shards where the fewest processes are, the rest where the run is kept"


def inventory(
    machines: Sequence[tuple[int, str, object]], seats: Seats, plaintext: bool = False, parts: Parts = ONE_PART
) -> Inventory:  # fmt: skip
    """Of machines with their numbers, names, and what they have."""
    why = WHY
    if parts.number > 1:
        apart = "on as many machines as possible" if parts.spread else "on one machine where that has cores for all"
        why += f", the {parts.number} parts of a replica {apart}"
    runs = [(number, name, str(has), _runs(number, seats, parts.number)) for number, name, has in machines]
    return Inventory(why, runs, plaintext)


def _runs(machine: int, seats: Seats, parts: int) -> str:
    runs = [
        f"{role}{'s' * (len(found) > 1)} {ranges(found)}" if role in ("replica", "shard", "backup") else role
        for role in ("coordinator", "evaluator", "shard", "backup", "replica")
        if (found := sorted(index for (r, index), at in seats.items() if (r, at) == (role, machine)))
    ]
    there = [index for (role, index), at in seats.items() if (role, at) == ("part", machine)]
    for part in range(1, parts):
        if found := sorted(index // parts for index in there if index % parts == part):
            runs.append(f"part {part} of replica{'s' * (len(found) > 1)} {ranges(found)}")
    return ", ".join(runs) or "nothing"


def in_words(found: Inventory) -> str:
    """As a table of text."""
    rows = [
        ("machine", "has", "runs there"),
        *((f"{number}: {name}", has, runs) for number, name, has, runs in found.machines),
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"    {name:<{widths[0]}}  {has:<{widths[1]}}  {runs}" for name, has, runs in rows]
    if found.plaintext:
        lines.append("    between them: plain text, which whoever is on its way can read and change (--plaintext)")
    return "\n".join([f"what runs where ({found.why}):", *lines])


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
