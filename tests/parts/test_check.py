"""What cannot be split is refused before anything is launched, with the remedy; and where a pipeline is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import squall
from squall.parts.check import check_split
from squall.parts.stages import balanced
from tests.tasks import mean_square, numbers


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.back, self.other = nn.Linear(6, 5), nn.Linear(5, 1), nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.back(self.front(inputs).tanh())


class Wrapped(nn.Module):
    """Passes a dict on."""

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"hidden": inputs}


def task(model: nn.Module, split: Any, **options: Any) -> squall.Task:
    options = {"loss": mean_square, "train": numbers(64), "batch_size": 16} | options
    return squall.Task(model=model, split=split, **options)


def two() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))


def twice(model: nn.Module, batch: Any) -> Tensor:
    return mean_square(model, batch) + mean_square(model, batch)


def never(model: nn.Module, batch: Any) -> Tensor:
    return (model.get_submodule("1")(model.get_submodule("0")(batch[0])) ** 2).mean()


REFUSED = [
    (two, None, 2, {}, "does not say how its model is split: give Task"),
    (two, squall.Pipeline(microbatches=4), 0, {}, "parts is 0: it must be at least 1"),
    (two, squall.Pipeline(microbatches=4), 3, {}, "2 modules for 3 stages .* use fewer parts"),
    (two, squall.Pipeline(microbatches=4, schedule="interleaved"), 2, {}, "2 modules for 4 stages"),
    (two, squall.Pipeline(microbatches=32), 2, {}, "fewer examples than Pipeline.microbatches"),
    (two, squall.Pipeline(microbatches=5), 2, {}, "not a multiple of Pipeline.microbatches, 5: use 2 or 4 micro"),
    (two, squall.Pipeline(microbatches=1), 2, {}, "use more, or schedule \"gpipe\""),
    (two, squall.Pipeline(microbatches=4), 2, {"loss": twice}, "calls its model twice"),
    (two, squall.Pipeline(microbatches=4), 2, {"loss": never}, "never calls its model"),
    (Model, squall.Pipeline(microbatches=4), 2, {}, "cannot see the stages of a Model: give stages="),
    (Model, squall.Pipeline(lambda m: [m.front, m.back], 4), 2, {}, "must name all that the model's forward does"),
    (Model, squall.Pipeline(lambda m: [m.front, m.other], 4), 2, {}, "Linear, does not take what Linear returns"),
    (Model, squall.Pipeline(lambda m: [m.front, nn.Tanh(), m.back], 4), 2, {}, "Tanh, which is no module of the model"),
    (Model, squall.Pipeline(lambda m: [m.front, None], 4), 2, {}, "must return modules of the model"),
    (
        lambda: nn.Sequential(nn.Linear(6, 1), Wrapped()), squall.Pipeline(lambda m: [m[0], m[1], m[1]], 4), 2, {},
        "passes dict on to Wrapped",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "split", "parts", "options", "words"), REFUSED)
def test_what_cannot_be_split(model: Any, split: Any, parts: int, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_split(task(model(), split, **options), parts)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: squall.Pipeline(microbatches=0), "Pipeline.microbatches is 0"),
        (lambda: squall.Pipeline(schedule="zbv"), "one of 1f1b, gpipe, interleaved, zero-bubble"),  # type: ignore[arg-type]
        (lambda: squall.Pipeline([nn.Linear(1, 1)]), "Pipeline.stages is .* a function of the model"),  # type: ignore[arg-type]
        (lambda: squall.Tensor({}), "Tensor.layers is {}"),
        (lambda: squall.Tensor({"up": "cols"}), "one of column, row, gathered"),  # type: ignore[dict-item]
        (lambda: squall.Branches("left"), "at least two names"),
        (lambda: squall.Branches("left", "left"), "at least two names"),
    ],
)
def test_splits_check_themselves(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_one_part_ignores_the_split() -> None:
    assert check_split(task(Model(), squall.Pipeline(microbatches=5)), 1) == ((), "")


class Slow(nn.Module):
    """Takes its time, on a clock of the test's."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds, self.layer = clock, seconds, nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        self.clock[0] += self.seconds
        return self.layer(inputs)


def test_stages_take_equal_time_and_the_model_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("squall.parts.stages.time.perf_counter", lambda: clock[0])
    three, *ones = (Slow(clock, seconds) for seconds in (3.0, 1.0, 1.0, 1.0))
    model = nn.Sequential(three, ones[0], nn.BatchNorm1d(6), ones[1], nn.Dropout(), ones[2])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    starts, text = check_split(task(model, squall.Pipeline(microbatches=4)), 2)
    assert starts == (0, 1)
    assert text == ("stage 0: Slow, 50% of the time\nstage 1: Slow ... Slow (5 modules), 50% of the time")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize(
    ("seconds", "stages", "starts"),
    [((1, 1, 1, 1), 2, (0, 2)), ((3, 1, 1, 1), 2, (0, 1)), ((1, 1, 1, 3), 3, (0, 2, 3)), ((5, 1), 2, (0, 1))],
)
def test_the_slowest_stage_takes_the_least_time(seconds: Any, stages: int, starts: Any) -> None:
    found = balanced(seconds, stages)
    bounds = [*zip(found, [*found[1:], len(seconds)])]
    best = [*zip(starts, [*starts[1:], len(seconds)])]
    assert max(sum(seconds[a:b]) for a, b in bounds) == max(sum(seconds[a:b]) for a, b in best)
    assert all(a < b for a, b in bounds)
