"""A batch of a replica of several parts: how long it takes them, and how many cores it keeps busy.

What a part computes is a share of what the whole replica's step takes in one process. Numbers between parts are
counted in elements of float32. In a pipeline every forward and backward pass of a microbatch waits for its input, in
the order of torch's schedules. With links that cost nothing, p equal stages take (m + p - 1) / (p m) of a step for m
microbatches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from squall.splits import ScheduleName

PASSES = "FBIW"  # as torch abbreviates them
FORWARD = 1 / 3  # of a stage's time; the backward pass has two halves, for its input and for its weights
ANY_NUMBER = {1: "gpipe", 2: "LoopedBFS"}  # of microbatches, by stages a part: where a batch has fewer

Hop = Callable[[int, int, float], float]  # (part, another part, elements) -> seconds until the other one has them
Pass = tuple[str, int, int]  # (what, stage, microbatch); "F", "B", or "I" and "W" for its halves
Order = Sequence[Pass]  # of one part


class Lasting(NamedTuple):
    seconds: float
    cores: float  # that compute, mean


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """Stage i is on part i % parts.

    Attributes:
        shares: of a step, that each stage takes for all microbatches of a batch.
        passed: elements of a batch that each stage gives the next, and as many come back.
        microbatches: of a batch.
        schedule: as of `squall.Pipeline`.
    """

    shares: tuple[float, ...]
    passed: tuple[int, ...]
    microbatches: int
    schedule: ScheduleName = "1f1b"

    @property
    def parts(self) -> int:
        return len(self.shares) // stages_each(self.schedule)

    def lasts(self, step_s: float, batches: float, hop: Hop) -> Lasting:
        """Of so many batches, each as long as `step_s` in one process. Less than one has fewer microbatches."""
        count = math.ceil(min(1.0, batches) * self.microbatches - 1e-9)
        schedule = self.schedule if count == self.microbatches else ANY_NUMBER[stages_each(self.schedule)]
        orders = orders_of(schedule, len(self.shares), self.parts, count)
        each = [share * step_s / self.microbatches for share in self.shares]
        seconds = self._makespan(orders, each, hop)
        busy_s = count * sum(each)
        times = batches * self.microbatches / count
        return Lasting(times * seconds, busy_s / seconds if seconds else float(self.parts))

    def _makespan(self, orders: Sequence[Order], each: Sequence[float], hop: Hop) -> float:
        last, over = len(self.shares) - 1, [0.0] * self.parts  # when each part is done with its last pass so far
        there: dict[Pass, float] = {}  # when its output is where it is needed
        waiting = [deque(order) for order in orders]
        while any(waiting):
            found = False
            for part, passes in enumerate(waiting):
                while passes and _ready(passes[0], there, last):
                    what, stage, number = passes.popleft()
                    found = True
                    begins = max(over[part], there.get(_needs((what, stage, number), last), 0.0))
                    over[part] = begins + each[stage] * (1 - FORWARD if what == "B" else FORWARD)
                    if what != "W":
                        way = "F" if what == "F" else "B"
                        there[way, stage, number] = over[part] + self._moving_s(way, stage, hop)
            assert found, "a schedule in which all wait for each other"
        return max(over)

    def _moving_s(self, way: str, stage: int, hop: Hop) -> float:
        """Until a microbatch's output is where the next pass needs it."""
        to = stage + 1 if way == "F" else stage - 1
        if not 0 <= to < len(self.shares):
            return 0.0
        return hop(stage % self.parts, to % self.parts, self.passed[min(stage, to)] / self.microbatches)


@dataclass(frozen=True, kw_only=True)
class ParallelStep:
    """Slices or branches: all parts work on the same batch, and wait for each other now and then.

    Attributes:
        shares: of a step, that each part takes.
        waits: for each time that all wait for each other, (elements that each receives, in how many messages, one after
            the other).
    """

    shares: tuple[float, ...]
    waits: tuple[tuple[float, int], ...] = ()

    @property
    def parts(self) -> int:
        return len(self.shares)

    def lasts(self, step_s: float, batches: float, hop: Hop) -> Lasting:
        """As of `PipelineStep`."""
        pairs = [(part, (part + 1) % self.parts) for part in range(self.parts)]
        waited_s = 0.0
        for elements, messages in self.waits:
            size = min(1.0, batches) * elements / messages
            waited_s += messages * max(hop(source, target, size) for source, target in pairs)
        seconds = batches * max(self.shares) * step_s + max(1.0, batches) * waited_s
        return Lasting(seconds, batches * sum(self.shares) * step_s / seconds if seconds else float(self.parts))


SplitStep = PipelineStep | ParallelStep


def stages_each(schedule: str) -> int:
    """Stages of one part."""
    return 1 if schedule in ("1f1b", "gpipe") else 2


def _needs(own: Pass, last: int) -> Pass:
    """The pass that must be over before this one, beside those before it in its part's own order; itself: none."""
    what, stage, number = own
    if what == "W" or (what == "F" and stage == 0):
        return own
    if what == "F":
        return "F", stage - 1, number
    return ("B", stage + 1, number) if stage < last else ("F", stage, number)


def _ready(own: Pass, there: Mapping[Pass, float], last: int) -> bool:
    needs = _needs(own, last)
    return needs == own or needs in there


def orders_of(schedule: str, stages: int, parts: int, microbatches: int) -> list[Order]:
    """What each part does, one after the other. `schedule` is one of `squall.Pipeline`'s, or a name of torch's."""
    if stages > parts:
        from squall.parts.pipeline import SCHEDULES

        return _torchs_own(SCHEDULES.get(schedule, schedule), stages, parts, microbatches)
    numbers = range(microbatches)
    orders: list[Order] = []
    for stage in range(stages):
        ahead = microbatches if schedule == "gpipe" else min(microbatches, stages - stage)
        order = [("F", stage, number) for number in numbers[:ahead]]
        for number in numbers:
            order.append(("B", stage, number))
            if number + ahead < microbatches:
                order.append(("F", stage, number + ahead))
        orders.append(order)
    return orders


class _Stage:
    """Of a stage, as much as torch looks at to make an order."""

    has_backward = True
    is_first = is_last = False
    submod = None

    def __init__(self, index: int, stages: int, parts: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_size, self.group_rank = parts, index % parts


def _torchs_own(name: str, stages: int, parts: int, microbatches: int) -> list[Order]:
    from torch.distributed.pipelining.schedules import get_schedule_class

    own: Any = [_Stage(index, stages, parts) for index in range(0, stages, parts)]
    made: Any = get_schedule_class(name)(own, microbatches, loss_fn=lambda loss, _: loss)
    orders: list[Order] = []
    for part in range(parts):
        actions = [action for action in made.pipeline_order[part] if action is not None]
        passes = [(action.computation_type.value, action.stage_index, action.microbatch_index) for action in actions]
        orders.append([each for each in passes if each[0] in PASSES])
    return orders
