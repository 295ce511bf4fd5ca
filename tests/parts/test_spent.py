"""What the parts of a replica do with their time, and their memory."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import squall
from squall.parts import spent
from squall.parts.spent import Spent, measured
from squall.protocol.effects import End, UseWeights
from squall.protocol.events import GradientComputed
from squall.runtime.driver import Host
from squall.runtime.job import Job
from tests import deep
from tests.parts.replica import compute, replica
from tests.tasks import mean_square, numbers

EACH = 4


class Clock:
    """Of one process. It stands still unless somebody moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(spent.time, "perf_counter", lambda: self.now)

    def run(self, turns: Sequence[float], used: bool = True) -> Spent:
        """One schedule: seconds of waiting and of computing, in turn."""
        found = Spent()
        for _ in range(3):
            with found.at_work():
                self.now += 0.5  # loading the batch
                with found.in_schedule(counts=used):
                    for number, seconds in enumerate(turns):
                        if number % 2:
                            with found.in_stage():
                                self.now += seconds
                        else:
                            self.now += seconds
                with found.waiting():
                    self.now += 0.25
        return found


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_equal_stages_have_the_bubble_of_the_books(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPipe on two parts, a microbatch and stage in 1 s forward and 1 s back: each waits 2 s of all."""
    clock = Clock(monkeypatch)
    first = clock.run([0, microbatches, 2, microbatches])
    second = clock.run([1, 2 * microbatches])  # and the schedule of the first goes on
    numbers_ = measured(first, [second.told()])
    share = squall.Pipeline(microbatches=microbatches).bubble(2)
    for part in range(2):
        compute_s, wait_s, bubble_s, _ = numbers_[EACH * part : EACH * (part + 1)]
        assert compute_s == pytest.approx(3 * (0.5 + 2 * microbatches))
        assert wait_s == pytest.approx(3 * 0.25)
        assert bubble_s == pytest.approx(3 * 2)
        assert bubble_s / (bubble_s + compute_s - 3 * 0.5) == pytest.approx(share)


def test_the_first_use_of_a_schedule_is_no_bubble(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers_ = measured(Clock(monkeypatch).run([1, 1], used=False), [])
    assert numbers_[:3] == pytest.approx((3 * 1.5, 3 * 1.25, 0))


def test_what_no_part_can_have_spent_is_kept_in_bounds() -> None:
    assert measured(Spent(), [(-1.0, math.nan, math.inf)])[EACH:] == (0.0, 0.0, 0.0, 1e15)


def test_a_part_computes_no_longer_than_its_replica_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Clock(monkeypatch).run([1, 1])
    compute_s, wait_s, bubble_s, _ = measured(first, [(first.total_s + 1, 0.0, 0.0)])[EACH:]
    assert (compute_s, wait_s, bubble_s) == (first.total_s, 0.0, 0.0)


class Heavy(nn.Module):
    """Takes its time on one part, of those that compute it."""

    def __init__(self, part: int, seconds: float = 0.02) -> None:
        super().__init__()
        self.layer, self.part, self.seconds = nn.Linear(6, 6), part, seconds

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.distributed.get_rank() == self.part:
            until = time.thread_time() + self.seconds
            while time.thread_time() < until:
                torch.zeros(1000).sum()
        return self.layer(inputs)


class Sides(nn.Module):
    """Sliced layers, or branches."""

    def __init__(self, part: int) -> None:
        super().__init__()
        # As much as stages have for all microbatches: waiting for a processor is no less where others use it.
        self.heavy, self.up, self.down = Heavy(part, 8 * 0.02), nn.Linear(6, 6), nn.Linear(6, 6)
        self.left, self.right, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.down(self.up(self.heavy(inputs)).relu())
        left, right = self.left(hidden), self.right(hidden)
        return self.head(left + right)


def told(steps: int) -> Any:
    def script(host: Host, job: Job) -> Any:
        host.perform(UseWeights(0), 0.0)
        found = []
        for number in range(steps):
            event = host.perform(compute(job.task, number), 0.0)
            assert isinstance(event, GradientComputed)
            found.append((event.inside, event.seconds))
            host.rest()
        host.perform(End("finished"), 0.0)
        return found

    return script


KINDS = ("pipeline", "interleaved", "zero-bubble", "slices", "branches")


@pytest.mark.parametrize(("kind", "heavy"), deep.sweep(list(product(KINDS, (0, 1))), 2))
def test_who_has_less_to_do_waits_longer(kind: str, heavy: int) -> None:
    piped = kind not in ("slices", "branches")
    split: Any = squall.Branches("left", "right")
    if piped:
        split = squall.Pipeline(microbatches=4, schedule="1f1b" if kind == "pipeline" else kind)  # type: ignore[arg-type]
    elif kind == "slices":
        split = squall.Tensor({"up": "column", "down": "row"})
    stages = [Heavy(heavy), Heavy(heavy), Heavy(heavy), nn.Sequential(Heavy(heavy), nn.Linear(6, 1))]
    model = nn.Sequential(*stages) if piped else Sides(heavy)
    starts = (0, 2) if kind == "pipeline" else (0, 1, 2, 3) if piped else ()
    task = squall.Task(model=model, loss=mean_square, train=numbers(64), batch_size=16, split=split)
    found = replica(task, 2, told(4), starts)
    first, last = ([inside[at : at + EACH] for at in (0, EACH)] for inside, _ in (found[0], found[-1]))
    compute_s, wait_s, bubble_s = (
        [after[n] - before[n] for before, after in zip(first, last)] for n in range(EACH - 1)
    )
    sums = [sum(times) for times in zip(compute_s, wait_s, bubble_s)]
    assert sums[0] == pytest.approx(sums[1])
    assert sums[0] >= sum(seconds for _, seconds in found[1:]), "the replica's own time is all in it"
    assert compute_s[heavy] >= 3 * 8 * 0.02
    idle = bubble_s if piped else wait_s
    assert idle[1 - heavy] > idle[heavy]
    assert (bubble_s == [0, 0]) == (not piped)
    assert all(memory > 1 << 20 for *_, memory in last), "a process has some MB of its own"
    assert [memory for *_, memory in first] == [0, 0], "and when the first step ends nobody has looked"
