"""`[parts]` of a cluster file: what a batch is to the parts of a replica, in place of what a task's split says."""

from __future__ import annotations

import math
from typing import Any, get_args

from squall.sim.cluster.split_step import ParallelStep, PipelineStep, SplitStep, stages_each
from squall.sim.cluster.tables import Table
from squall.splits import ScheduleName

MOST_PARTS, MOST_ELEMENTS = 4096, 10**12
KEYS = ("shares", "microbatches", "schedule", "passed", "waits")


def read_split(table: Table) -> SplitStep | None:
    """None where the file has none. Raises `ClusterError`."""
    if not table.values:
        return None
    table.expect(KEYS, required=["shares"])
    shares = tuple(map(float, _numbers(table, "shares", "[0.55, 0.52]", lambda x: 0 < x < 1e6)))
    if "microbatches" not in table.values:
        for key in ("schedule", "passed"):
            if key in table.values:
                table.refuse(key, f"{key} is of a pipeline, and there are no microbatches", "add microbatches = 8")
        return ParallelStep(shares=_several(table, shares, 1), waits=_waits(table))
    if "waits" in table.values:
        table.refuse("waits", "the stages of a pipeline have microbatches and no waits", "leave one of them out")
    microbatches = table.whole("microbatches", MOST_PARTS)
    schedule = table.word("schedule", get_args(ScheduleName)) if "schedule" in table.values else "1f1b"
    _several(table, shares, stages_each(schedule))
    if "passed" not in table.values:
        table.refuse(None, "parts has no 'passed'", "add passed = [...], elements from each stage to the next")
    passed = tuple(_numbers(table, "passed", "[524288]", _countable))
    if len(passed) != len(shares) - 1:
        table.refuse("passed", f"{len(passed)} sizes between {len(shares)} stages", f"give {len(shares) - 1}")
    if schedule != "gpipe" and microbatches < len(shares) // stages_each(schedule):
        table.refuse("microbatches", f"{microbatches} are fewer than there are parts", 'make more, or use "gpipe"')
    return PipelineStep(shares=shares, passed=passed, microbatches=microbatches, schedule=schedule)  # type: ignore[arg-type]


def _several(table: Table, shares: tuple[float, ...], each: int) -> tuple[float, ...]:
    if len(shares) < 2 * each or len(shares) % each:
        what = f"{len(shares)} shares are no {'stages' if each > 1 else 'parts'} of a replica"
        table.refuse("shares", what, f"give {each} for each of at least two parts")
    return shares


def _countable(value: float) -> bool:
    return 0 <= value <= MOST_ELEMENTS


def _numbers(table: Table, key: str, example: str, within: Any) -> list[Any]:
    values = table.items(key, example)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not within(value):
            table.refuse(key, f"{value!r} is impossible in {key}", f"write for example {key} = {example}")
    return values


def _waits(table: Table) -> tuple[tuple[float, int], ...]:
    if "waits" not in table.values:
        return ()
    example = "[[524288, 2], [524288, 2]]"
    waits = []
    for entry in table.items("waits", example):
        match entry:
            case [int() | float() as elements, int(messages)] if (
                _countable(elements) and 1 <= messages <= MOST_ELEMENTS
            ):
                waits.append((elements, messages))
            case _:
                table.refuse("waits", f"{entry!r} is no pair of elements and messages", f"write waits = {example}")
    return tuple(waits)


def split_lines(split: SplitStep) -> dict[str, str]:
    """The lines of the table: key -> value."""
    lines = {"shares": _text(split.shares)}
    if isinstance(split, ParallelStep):
        if split.waits:
            lines["waits"] = f"[{', '.join(map(_text, split.waits))}]"
        return lines
    schedule = f'"{split.schedule}"'
    return lines | {"microbatches": str(split.microbatches), "schedule": schedule, "passed": _text(split.passed)}


def _text(values: tuple[float, ...]) -> str:
    return f"[{', '.join(repr(value) for value in values if math.isfinite(value))}]"
