"""What an evaluation measures: means over examples, and objects that see the whole validation set."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import squall
from squall.record.rows import ExtraRow
from squall.report import Reader
from squall.report.figures import charts
from squall.runtime.evaluate import evaluate
from tests.tasks import mean_square, numbers, regression

Fit = Callable[..., squall.run.Run]


class F1:
    """Of positive targets, as torchmetrics would have it."""

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold
        self.reset()

    def reset(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.seen.append((predictions > self.threshold, targets > self.threshold))

    def compute(self) -> Tensor:
        found, there = (torch.cat(parts) for parts in zip(*self.seen))
        return 2 * (found & there).sum() / (found.sum() + there.sum())


class Vector(F1):
    def compute(self) -> Tensor:
        return torch.zeros(3)


def task(**metrics: Any) -> squall.Task:
    torch.manual_seed(0)
    return regression(validate=numbers(90), batch_size=16, metrics=metrics)()


def measured(**metrics: Any) -> dict[str, float]:
    built = task(**metrics)
    return evaluate(built, built.model, torch.device("cpu"))


def whole() -> float:
    built = task()
    metric = F1()
    inputs, targets = numbers(90).tensors
    with torch.no_grad():
        metric.update(built.model(inputs), targets)
    return float(metric.compute())


used = F1()
used.update(torch.ones(5), -torch.ones(5))


@pytest.mark.parametrize(
    "metric",
    [
        F1(), F1, partial(F1, threshold=0.0), lambda: F1(), used,
        (F1, lambda model, batch: (model(batch[0]), batch[1])),
    ],
    ids=["instance", "class", "partial", "factory", "used before", "with what it is fed"],
)  # fmt: skip
def test_an_object_is_fed_the_whole_validation_set(metric: Any) -> None:
    """90 examples in batches of 64: the mean of two batches' F1 is another number."""
    parts = []
    for batch in (slice(0, 64), slice(64, 90)):
        one = F1()
        with torch.no_grad():
            one.update(task().model(numbers(90).tensors[0][batch]), numbers(90).tensors[1][batch])
        parts.append(float(one.compute()))
    assert measured(f1=metric)["f1"] == pytest.approx(whole())
    assert sum(parts) / 2 != pytest.approx(whole(), abs=1e-4)


def test_what_was_given_stays_as_it_is() -> None:
    metric = F1()
    measured(f1=metric)
    assert not metric.seen


@pytest.mark.parametrize("number", [lambda mean: float(mean), lambda mean: mean], ids=["float", "tensor"])
def test_a_number_of_a_batch_is_averaged_by_examples(number: Callable[[Tensor], Any]) -> None:
    """The last batch is a short one."""
    found = measured(
        mean=lambda model, batch: number(batch[1].abs().mean()), each=lambda model, batch: batch[1].abs().squeeze(1)
    )
    assert found["mean"] == pytest.approx(found["each"])
    assert found["mean"] == pytest.approx(numbers(90).tensors[1].abs().mean().item())


WRONG = {
    "shape": (lambda model, batch: batch[1][:3, 0], "metric 'it' must give one value per example, shape.*it gave"),
    "nothing": (lambda model, batch: None, "metric 'it' must give .* or their mean: it gave NoneType"),
    "a word": ("accuracy", "metric 'it' is 'accuracy': give a function of"),
    "several numbers": (Vector(), "metric 'it' must compute one number: it computed .3."),
    "a factory of nothing": (lambda: None, "metric 'it' must have update and compute, or make what has: it made None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_the_metrics_name_before_the_run(name: str, run_dir: Path) -> None:
    metric, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        squall.fit(lambda: task(it=metric), squall.SingleProcess(), run_dir=run_dir)
    assert not run_dir.exists()


def test_a_batch_that_is_no_pair_needs_a_function(run_dir: Path) -> None:
    inputs = TensorDataset(torch.randn(20, 6))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()  # type: ignore[no-any-return]

    made = regression(train=inputs, validate=inputs, loss=loss, metrics={"f1": F1})
    with pytest.raises(ValueError, match=r"'f1' is fed .* and a batch is no pair: give"):
        squall.fit(made, squall.SingleProcess(), run_dir=run_dir)


def test_every_way_to_evaluate_takes_them(inline: Fit, tmp_path: Path) -> None:
    made = regression(validate=numbers(90), metrics={"f1": F1()})
    for strategy in (squall.SingleProcess(), squall.Downpour(replicas=2), squall.Sandblaster(batch="full")):
        run = inline(made, strategy, epochs=3)
        batch = numbers(90).tensors
        metric = F1()
        with torch.no_grad():
            metric.update(run.model(batch[0]), batch[1])
        assert run.summary().metrics["f1"] == pytest.approx(float(metric.compute()))
    session = squall.join(nn.Linear(6, 1))
    assert session.evaluate(numbers(90), {"f1": F1}).keys() == {"f1"}


# ---------------------------------------------------------------- beside the training loss


def with_extras(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
    error = mean_square(model, batch)
    return error, {"half": error / 2, "examples": len(batch[0])}


@pytest.mark.parametrize(
    "strategy",
    [squall.SingleProcess(), squall.Downpour(replicas=2, push_every=2), squall.Averaging(replicas=2, every=3)],
    ids=["single", "downpour", "averaging"],
)
def test_what_a_loss_returns_beside_itself_is_recorded_as_means_over_the_examples(
    inline: Fit, strategy: squall.Strategy
) -> None:
    run = inline(regression(loss=with_extras, validate=numbers(20)), strategy, epochs=4)
    with closing(Reader(run.directory / "run.sqlite")) as reader:
        rows, losses = reader.rows(ExtraRow), reader.progress()
        curves, drawn = reader.extras(), [chart.title for chart in charts(reader)]
    assert sum(row.examples for row in rows if row.name == "half") == 4 * 90
    assert curves["examples"][0][1] == pytest.approx((5 * 16 * 16 + 10 * 10) / 90)  # the last batch is a short one
    loss = sum(work.loss * work.examples for work in losses) / (4 * 90)
    assert curves["half"][0][1] == pytest.approx(loss / 2)
    assert "half over time" in drawn
    summary = run.summary()
    assert summary.extras.keys() == {"half", "examples"}
    assert summary.metrics.keys() == {"loss"}, "the loss of an evaluation is the loss alone"
    assert "half in training" in str(summary)


WRONG_LOSSES = {
    "three": (({}, {}), r"return the loss, or \(loss, {name: number}\)"),
    "no number": (({"a": "b"},), "returned 'a' beside the loss, which is no number"),
    "a metric's name": (({"loss": 1.0},), "returns loss beside the loss"),
    "a million": (({str(n): 1.0 for n in range(1 << 20)},), "1,048,576 numbers beside .* return sums or means of them"),
}


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_what_a_loss_cannot_return_is_said_before_the_run(name: str, run_dir: Path) -> None:
    beside, message = WRONG_LOSSES[name]
    with pytest.raises(ValueError, match=message):
        squall.fit(
            regression(loss=lambda model, batch: (mean_square(model, batch), *beside)),
            squall.SingleProcess(), run_dir=run_dir,
        )  # fmt: skip
    assert not run_dir.exists()
