"""The best weights, patience and `on_evaluation`, from the outside."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import squall
from squall.cli import main
from squall.errors import SnapshotMismatch
from squall.run import Run
from squall.runtime.best import NAME, kept
from squall.runtime.evaluate import evaluate
from tests.tasks import INLINE, LOCAL, numbers, regression

Fit = Callable[..., Run]
WILD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)  # now better, now worse
STRATEGIES = {
    "single": squall.SingleProcess(optimizer=WILD),
    "downpour": squall.Downpour(replicas=2, shards=2, optimizer=partial(torch.optim.SGD, lr=0.2)),
    "all-reduce": squall.AllReduce(replicas=2, optimizer=WILD),
    "sandblaster": squall.Sandblaster(replicas=2, shards=2, batch="full"),
}


def close(model: nn.Module, batch: Any) -> Tensor:
    return -(model(batch[0]) - batch[1]).abs().squeeze(1)


TASK = regression(train=numbers(90), validate=numbers(40), metrics={"close": close})


def value_of(model: nn.Module) -> dict[str, float]:
    return evaluate(TASK(), model, torch.device("cpu"))


@pytest.mark.parametrize("metric", ["loss", "close"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_weights_that_are_kept_are_those_that_were_measured_best(inline: Fit, strategy: str, metric: str) -> None:
    run = inline(TASK, STRATEGIES[strategy], epochs=6, keep_best=metric)
    rows = run.history.evaluations
    values = [math.nan if value is None else value for value in rows[metric]]  # iterations are rows as well
    best = min if metric == "loss" else max
    row = best(range(len(values)), key=lambda i: values[i] if values[i] == values[i] else -best(-9e9, 9e9))
    assert value_of(run.best)[metric] == pytest.approx(values[row], abs=1e-6)
    assert run.summary().best == {metric: values[row]}
    about = kept(run.directory)
    assert about is not None
    assert (about.updates, about.examples) == (rows["updates"][row], rows["examples"][row])
    last = [value for value in values if value == value][-1]
    assert value_of(run.model)[metric] == pytest.approx(last, abs=1e-6), "the last weights are measured last"


@pytest.mark.parametrize("strategy", ["single", "downpour"])
def test_patience_ends_the_run_and_says_so(inline: Fit, strategy: str) -> None:
    still = regression(train=numbers(90), validate=numbers(40), metrics={"still": lambda m, b: torch.zeros(len(b[0]))})
    run = inline(still, STRATEGIES[strategy], keep_best="still", patience=2)
    summary = run.summary()
    assert (summary.status, summary.ended) == ("finished", "patience")
    assert summary.reason == "still was not better than 0.0000 in 2 evaluations in a row"
    assert run.history.evaluations["updates"][0] == kept(run.directory).updates  # type: ignore[union-attr]
    again = squall.resume(run.directory, patience=3)
    assert len(again.history.evaluations["still"]) > len(run.history.evaluations["still"]) - 1
    assert again.summary().reason == "still was not better than 0.0000 in 3 evaluations in a row"


@pytest.mark.parametrize("strategy", ["single", "downpour"])
@pytest.mark.parametrize("settings", [INLINE, LOCAL], ids=["inline", "local"])
def test_on_evaluation_is_told_each_and_may_end_the_run(inline: Fit, strategy: str, settings: squall.Settings) -> None:
    told: list[dict[str, float]] = []

    def enough(evaluation: dict[str, float]) -> bool:
        told.append(evaluation)
        return len(told) == 2

    run = inline(TASK, STRATEGIES[strategy], epochs=100_000, on_evaluation=enough, settings=settings)
    assert run.summary().reason == "on_evaluation has ended the run"
    assert run.summary().status == "finished"
    columns = run.history.evaluations
    assert [list(evaluation.values()) for evaluation in told] == [
        [columns[name][row] for name in told[0]] for row in range(2)
    ]
    assert run.model is not None


@pytest.mark.parametrize("strategy", ["single", "downpour"])
@pytest.mark.parametrize("settings", [INLINE, LOCAL], ids=["inline", "local"])
def test_what_on_evaluation_raises_is_raised_and_there_is_a_snapshot(
    inline: Fit, run_dir: Path, strategy: str, settings: squall.Settings
) -> None:
    def broken(evaluation: dict[str, float]) -> None:
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user") as caught:
        inline(TASK, STRATEGIES[strategy], epochs=100_000, on_evaluation=broken, settings=settings, run_dir=run_dir)
    assert any("from snapshot 1 with: squall.resume" in note for note in caught.value.__notes__)
    assert Run(run_dir).summary().reason == "on_evaluation raised KeyError: 'of the user'"


def test_a_run_that_goes_on_does_not_forget_its_best_weights(inline: Fit, run_dir: Path) -> None:
    inline(TASK, STRATEGIES["downpour"], epochs=3, keep_best="loss", run_dir=run_dir)
    best = kept(run_dir)
    assert best is not None
    wild = squall.Downpour(replicas=1, optimizer=partial(torch.optim.SGD, lr=0.0, momentum=0.9))
    run = squall.resume(run_dir, epochs=4, strategy=wild, task=TASK)
    again = kept(run_dir)
    assert again is not None
    assert again.value <= best.value
    assert value_of(run.best)["loss"] == pytest.approx(again.value, abs=1e-6)


def test_a_file_that_is_damaged_is_not_taken_for_the_best(inline: Fit, run_dir: Path) -> None:
    run = inline(TASK, STRATEGIES["single"], epochs=1, keep_best="loss", run_dir=run_dir)
    data = bytearray((run_dir / NAME).read_bytes())
    data[-9] ^= 1
    (run_dir / NAME).write_bytes(data)
    with pytest.raises(SnapshotMismatch, match=r"best\.safetensors is damaged"):
        run.best  # noqa: B018
    with pytest.raises(SnapshotMismatch, match=r"best\.safetensors is damaged.*: remove it"):
        squall.resume(run_dir, epochs=2, task=TASK)
    assert squall.resume(run_dir, epochs=2, task=TASK, keep_best=None).summary().status == "finished"
    (run_dir / NAME).unlink()
    with pytest.raises(squall.SquallError, match="keeps no best weights: train with keep_best"):
        run.best  # noqa: B018


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another metric": ({"keep_best": "beauty"}, "keep_best names the metric 'beauty', but the task has loss, close"),
    "no function": ({"on_evaluation": 3}, "on_evaluation is 3: give a function of an evaluation"),
    "no patience": ({"patience": 0}, "patience is 0: it must be at least 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(name: str, inline: Fit) -> None:
    options, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        inline(TASK, STRATEGIES["downpour"], **options)


def test_without_a_validation_set_nothing_can_be_best(inline: Fit) -> None:
    with pytest.raises(ValueError, match="patience names the metric 'loss', but the task has no validation set"):
        inline(regression(), STRATEGIES["downpour"], patience=3)


def test_the_command_line_has_the_same(tmp_path: Path, capsys: Any, without_report: None) -> None:
    file = Path(__file__).parents[1] / "examples" / "digits.py"
    flags = ("--epochs", "2", "--keep-best", "accuracy", "--patience", "1", "--launcher", "inline", "--threads", "1")
    assert main(["train", str(file), *flags, "--json", "--run-dir", str(tmp_path / "r")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["best"]["accuracy"] >= document["metrics"]["accuracy"]
    plan = json.loads((tmp_path / "r" / "run.json").read_text())["plan"]
    assert (plan["keep_best"], plan["patience"]) == ("accuracy", 1)
