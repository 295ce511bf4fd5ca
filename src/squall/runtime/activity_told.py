"""What processes do with their time, for the record."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import astuple

from squall.protocol.nursery_messages import Spent
from squall.record.rows import ActivityRow


def activity_rows(time_s: float, machine: int, spent: tuple[Spent, ...]) -> Iterator[ActivityRow]:
    for node, seconds, compute_s, apply_s, send_s, wait_s, awaited, awaited_s, memory in map(astuple, spent):
        name = f"{awaited.role} {awaited.index}" if awaited is not None else ""
        awaited_s = min(awaited_s, seconds)  # the wait may have begun before these
        yield ActivityRow(
            time_s, machine, str(node), seconds, compute_s, apply_s, send_s, wait_s, name, awaited_s, memory
        )  # fmt: skip
