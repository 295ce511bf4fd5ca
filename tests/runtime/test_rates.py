"""A schedule that leaps is the schedule that takes every step, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from squall.runtime import rates
from squall.runtime.rates import Schedule
from tests.tasks import regression

Make = Callable[[Optimizer], Any]


class Warmup:
    """A callable with a state of its own."""

    calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return min(1.0, self.calls / 90)


def chained(optimizer: Optimizer) -> Any:
    first = lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=33)
    return lr_scheduler.ChainedScheduler([first, lr_scheduler.ExponentialLR(optimizer, 0.99)], optimizer=optimizer)


def sequential(optimizer: Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.MultiStepLR(optimizer, [40, 90], 0.3)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[20])


SCHEDULES: dict[str, Make] = {
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.97**step),
    "callable object": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Warmup()),
    "multiplicative": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: 0.999),
    "step": partial(lr_scheduler.StepLR, step_size=7, gamma=0.7),
    "multistep": partial(lr_scheduler.MultiStepLR, milestones=[5, 50, 97], gamma=0.3),
    "linear": partial(lr_scheduler.LinearLR, total_iters=60),
    "exponential": partial(lr_scheduler.ExponentialLR, gamma=0.98),
    "polynomial": partial(lr_scheduler.PolynomialLR, total_iters=120, power=1.7),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=47),
    "warm restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=9, T_mult=2),
    "cyclic": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.2, step_size_up=13),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=200),  # moves momentum, too
    "chained": chained,
    "sequential": sequential,
}


class Counted:
    """A task's schedule, and how many steps it took itself."""

    def __init__(self, make: Make, file: Path | None = None) -> None:
        two = [{"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))], "lr": 0.03}]
        self.optimizer = torch.optim.SGD(two, lr=0.1, momentum=0.9)
        self.taken = 0
        self.schedule = Schedule(regression(schedule=self._counting(make))(), self.optimizer)
        self.schedule.file = file

    def _counting(self, make: Make) -> Make:
        def build(optimizer: Optimizer) -> Any:
            scheduler = make(optimizer)
            step = type(scheduler).step

            class Counting(type(scheduler)):  # type: ignore[misc]
                def step(inner, *given: Any) -> None:
                    self.taken += 1
                    step(inner, *given)

            scheduler.__class__ = Counting
            return scheduler

        return build

    @property
    def rates(self) -> list[tuple[float, float]]:
        return [(group["lr"], group["momentum"]) for group in self.optimizer.param_groups]


@pytest.fixture(autouse=True)
def a_line_every_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "EVERY", 10)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_leap_ends_where_all_the_steps_do(tmp_path: Path, name: str) -> None:
    make, file = SCHEDULES[name], tmp_path / rates.NAME
    Counted(make, file).schedule.advance(140)
    straight, leapt = Counted(make), Counted(make, file)
    for steps in (3, 60, 97, 133, 138, 150):
        straight.schedule.advance(steps)
        leapt.schedule.advance(steps)
        assert leapt.rates == straight.rates, steps
    assert straight.taken == 150
    assert leapt.taken <= 60


def test_other_settings_take_their_own_steps(tmp_path: Path) -> None:
    file = tmp_path / rates.NAME
    Counted(partial(lr_scheduler.ExponentialLR, gamma=0.9), file).schedule.advance(50)
    slower = partial(lr_scheduler.ExponentialLR, gamma=0.99)
    straight, again = Counted(slower), Counted(slower, file)
    straight.schedule.advance(45)
    again.schedule.advance(45)
    assert again.rates == straight.rates
    assert again.taken == 45


def test_another_function_counts_at_once(tmp_path: Path) -> None:
    """No settings tell one function from another."""
    file = tmp_path / rates.NAME
    Counted(partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.5), file).schedule.advance(40)
    again = Counted(partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / step if step else 1.0), file)
    again.schedule.advance(40)
    assert again.rates[0][0] == 0.1 * (1 / 40)


def test_a_file_that_was_cut_off_serves_as_far_as_it_goes(tmp_path: Path) -> None:
    file = tmp_path / rates.NAME
    make = SCHEDULES["cosine"]
    Counted(make, file).schedule.advance(40)
    file.write_bytes(file.read_bytes()[:-20])
    again, straight = Counted(make, file), Counted(make)
    for schedule in (again, straight):
        schedule.schedule.advance(55)
    assert again.rates == straight.rates
    assert again.taken == 25
    last = Counted(make, file)
    last.schedule.advance(55)
    assert last.taken == 5, "what was missing was kept meanwhile"


def test_a_directory_that_is_gone_only_costs_steps(tmp_path: Path) -> None:
    lost = Counted(SCHEDULES["cosine"], tmp_path / "gone" / rates.NAME)
    lost.schedule.advance(60)
    assert lost.taken == 60
