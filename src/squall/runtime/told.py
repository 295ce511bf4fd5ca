"""What becomes rows of the record as it is told: who comes and goes, and what processes do with their time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import assert_never

from msgspec.structs import astuple

from squall.protocol import notes
from squall.protocol.ledger import size
from squall.protocol.messages import Stats
from squall.protocol.nodes import Node
from squall.protocol.nursery_messages import Spent
from squall.record.rows import ActivityRow, EventRow, ExtraRow, LossRow, MemberRow, ProgressRow, Row, StalenessRow

Told = (
    notes.ActivityTold | notes.MemberJoined | notes.MemberLeft | notes.MemberDied | notes.MemberReplaced
    | notes.MachineAdded | notes.MachineDied | notes.MachineLeft | notes.TargetReached | notes.Remark
    | notes.UpdatesLost
)  # fmt: skip


def rows_told(note: Told, time_s: float) -> Iterator[Row]:
    match note:
        case notes.ActivityTold(machine, spent):
            yield from _activity(time_s, machine, spent)
        case notes.MemberJoined(node, pid):
            yield MemberRow(str(node), pid, time_s, "joined", "")
        case notes.MemberLeft(node):
            yield MemberRow(str(node), 0, time_s, "left", "")
        case notes.MemberDied(node, why):
            yield MemberRow(str(node), 0, time_s, "lost", f"{node.role} {node.index}: {why}")
            yield EventRow(time_s, "lost", f"{node.role} {node.index}: {why}")
        case notes.MemberReplaced(node, where):
            if node.role in ("shard", "coordinator"):  # by one of its name, who need not join
                yield MemberRow(str(node), 0, time_s, "joined", "")
            yield EventRow(time_s, "replaced", f"{node.role} {node.index}" + (f", on {where}" if where else ""))
        case notes.MachineAdded(machine, room):
            yield EventRow(time_s, "joined", f"machine {machine}, with room for {room} replicas")
        case notes.MachineDied(machine, nodes, why):
            yield EventRow(time_s, "lost", f"machine {machine}, with {len(nodes)} processes: {why}")
        case notes.MachineLeft(machine):
            yield EventRow(time_s, "left", f"machine {machine}")
        case notes.UpdatesLost():
            yield from _lost(time_s, note)
        case notes.TargetReached(text):
            yield EventRow(time_s, "reached", text)
        case notes.Remark(kind, text):
            yield EventRow(time_s, kind, text)
        case _:
            assert_never(note)


def rows_of_work(node: Node, stats: Stats, time_s: float, bytes_each: int, blocks: int) -> Iterator[Row]:
    """`bytes_each`: of all that a replica fetches at once; it pushes one of so many `blocks` of that."""
    if stats.examples or stats.pushes:
        loss = stats.loss_sum / stats.examples if stats.examples else math.nan
        yield ProgressRow(
            time_s, node.index, stats.examples, stats.batches, loss, stats.compute_s, stats.wait_s,
            stats.pushes * (bytes_each // blocks), stats.fetches * bytes_each, stats.clock,
        )  # fmt: skip
    for name, (total, examples) in stats.extras.items():
        yield ExtraRow(time_s, node.index, examples, name, total / examples)
    for staleness, count in sorted(stats.staleness.items()):
        yield StalenessRow(time_s, node.index, staleness, count)


def _lost(time_s: float, note: notes.UpdatesLost) -> Iterator[Row]:
    yield from (LossRow(time_s, note.shard, *span) for span in note.ranges)
    examples = f"{count:,}" if (count := sum(map(size, note.ranges))) else "no more"
    when = ", by a resume" if note.over else ""
    text = f"shard {note.shard} died inside an update and went back from version {note.last:,} to {note.first:,}"
    yield EventRow(time_s, "lost", f"{text}; {examples} examples are dealt again{when}")


def _activity(time_s: float, machine: int, spent: tuple[Spent, ...]) -> Iterator[ActivityRow]:
    for node, seconds, compute_s, apply_s, send_s, wait_s, awaited, awaited_s, memory, copied_s in map(astuple, spent):
        name = f"{awaited.role} {awaited.index}" if awaited is not None else ""
        awaited_s = min(awaited_s, seconds)  # the wait may have begun before these
        yield ActivityRow(
            time_s, machine, str(node), seconds, compute_s, apply_s, send_s, wait_s, name, awaited_s, memory, copied_s
        )  # fmt: skip
