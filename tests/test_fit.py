"""`fit` from the outside: what is refused leaves nothing behind, and what goes wrong later is told once."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import squall
from squall import attending
from squall.errors import SnapshotMismatch
from squall.record.rows import MetricRow
from squall.report import Reader, audit
from squall.run import Run
from tests import deep, warm
from tests.tasks import INLINE, LOCAL, mean_square, numbers, plain, regression

Fit = Callable[..., Run]
DOWNPOUR = squall.Downpour(replicas=2, shards=2, optimizer=partial(torch.optim.SGD, lr=0.05))
THREE = [squall.SingleProcess(), DOWNPOUR, squall.AllReduce()]


def children() -> set[int]:
    """Processes that this one started and that are still there."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in found.split()}


@pytest.fixture
def nothing_left(run_dir: Path) -> Iterator[None]:
    warm.warm_process()
    before = children()
    yield
    assert not run_dir.exists()
    assert children() == before


class Broken(Exception):
    """The user's own exception."""


def raises() -> squall.Task:
    raise Broken("the data is not on this machine")


def raises_value_error() -> squall.Task:
    raise ValueError("the user's own ValueError")


def of_frozen() -> nn.Module:
    return plain().requires_grad_(False)


def needs_arguments(size: int) -> squall.Task:
    return regression()()


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no replicas": (regression(), {"strategy": squall.Downpour(replicas=0)}, ValueError, "replicas is 0"),
    "no epochs": (regression(), {"epochs": -1}, ValueError, "epochs is -1: it must be at least 1"),
    "many shards": (regression(), {"strategy": squall.Downpour(shards=999)}, ValueError, "use at most 73 shards"),
    "no function": (regression()(), {}, ValueError, "task must be a function without arguments"),
    "no function either": (None, {}, ValueError, "task must be a function without arguments"),
    "returns nothing": (lambda: None, {}, ValueError, "must return a squall.Task, it returned NoneType"),
    "raises": (raises, {}, Broken, "the data is not on this machine"),
    "raises ValueError": (raises_value_error, {}, ValueError, "the user's own ValueError"),
    "wants arguments": (needs_arguments, {}, TypeError, "size"),
    "loss no scalar": (
        regression(loss=lambda model, batch: model(batch[0])), {}, ValueError, "must return a scalar"),
    "nothing trainable": (regression(of_frozen), {}, ValueError, "no trainable parameters"),
    "empty": (regression(train=TensorDataset(torch.empty(0, 6))), {}, ValueError, "Task.train is empty"),
    "not elementwise": (
        regression(), {"strategy": squall.Downpour(optimizer=torch.optim.LBFGS)}, ValueError, "not elementwise"),
    "unknown metric": (
        regression(validate=numbers(8)), {"until": "accuracy=0.9"}, ValueError, "'accuracy', but the task has loss"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_anything_is_there(name: str, run_dir: Path, nothing_left: None) -> None:
    task, options, kind, words = REFUSED[name]
    options = {"strategy": DOWNPOUR, "settings": INLINE} | options
    with pytest.raises(kind, match=words):
        squall.fit(task, run_dir=run_dir, **options)


@pytest.mark.cold
@pytest.mark.parametrize("name", deep.sweep(["raises", "no function", "loss no scalar"], 1))
def test_a_process_that_was_started_early_is_gone_as_well(name: str, run_dir: Path, nothing_left: None) -> None:
    task, options, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        squall.fit(task, DOWNPOUR, run_dir=run_dir, settings=LOCAL, **options)


@pytest.mark.parametrize("settings", [LOCAL, INLINE], ids=["local", "inline"])
def test_what_cannot_be_shipped_is_named(run_dir: Path, nothing_left: None, settings: squall.Settings) -> None:
    lock = threading.Lock()
    task = regression(loss=lambda model, batch: mean_square(model, batch) if lock else None)
    with pytest.raises(ValueError, match=r"cannot be shipped.*lock.*inside the task function"):
        squall.fit(task, DOWNPOUR, run_dir=run_dir, settings=settings)


# ---------------------------------------------------------------- the user's code raises later


class Broken100(Dataset[Any]):
    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Any:
        if index == 100:
            raise Broken("item 100 is damaged")
        return tuple(tensor[index] for tensor in numbers(160).tensors)


def loss_that_breaks(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    from setproctitle import getproctitle

    if getproctitle().startswith("squall replica"):
        raise Broken("the loss broke in a replica")
    return mean_square(model, batch)


@pytest.mark.parametrize("strategy", THREE)
def test_in_this_process_the_users_exception_comes_as_it_is(inline: Fit, strategy: squall.Strategy) -> None:
    with pytest.raises(Broken, match="item 100 is damaged"):
        inline(regression(train=Broken100()), strategy)


def test_in_a_replica_the_users_exception_comes_with_its_traceback_once(run_dir: Path, without_report: None) -> None:
    task = regression(train=Broken100(), loss=loss_that_breaks)
    with pytest.raises(squall.TaskError) as caught:
        squall.fit(task, DOWNPOUR, run_dir=run_dir, settings=LOCAL)
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Broken: the loss broke in a replica") == 1
    assert "in loss_that_breaks" in shown


def loss_that_leaves(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    from setproctitle import getproctitle

    if getproctitle().startswith("squall replica"):
        os._exit(0)
    return mean_square(model, batch)


@deep.only
def test_a_replica_that_leaves_without_an_error_is_lost_all_the_same(run_dir: Path, without_report: None) -> None:
    with pytest.raises(squall.SquallError, match=r"replica \d was lost 5 times in a row, last: exit status 0"):
        squall.fit(regression(loss=loss_that_leaves), DOWNPOUR, run_dir=run_dir, settings=LOCAL)


def test_a_run_is_not_resumed_with_another_optimizer(inline: Fit, run_dir: Path) -> None:
    inline(regression(), DOWNPOUR, run_dir=run_dir)
    adam = dataclasses.replace(DOWNPOUR, optimizer=torch.optim.Adam)
    with pytest.raises(SnapshotMismatch, match="holds the state of SGD, and the optimizer is Adam now: resume with"):
        squall.resume(run_dir, strategy=adam, epochs=2)


def test_a_limit_that_resume_does_not_have_is_named(run_dir: Path) -> None:
    with pytest.raises(TypeError, match=r"resume\(\) has no argument 'epoch': its limits are epochs, steps, until"):
        squall.resume(run_dir, epoch=2)


def of_a_model_it_knows() -> squall.Task:
    model = plain()
    return regression(lambda: model, loss=lambda given, batch: mean_square(model, batch))()


@pytest.mark.parametrize("strategy", THREE)
def test_a_loss_that_does_not_use_the_model_it_is_given_is_not_trained_in_silence(
    inline: Fit, strategy: squall.Strategy
) -> None:
    """Each replica has a model of its own here: the one that the loss closes over is none of them."""
    with pytest.raises(ValueError, match="it must use the model that it is given"):
        inline(of_a_model_it_knows, strategy)


def test_the_run_keeps_its_plan_and_versions(inline: Fit, run_dir: Path) -> None:
    inline(regression(), DOWNPOUR, seed=11, run_dir=run_dir)
    document = json.loads((run_dir / "run.json").read_text())
    assert document["plan"]["strategy"] == "downpour"
    assert document["plan"]["seed"] == 11
    assert document["plan"]["strategy_fields"]["shards"] == 2
    assert document["versions"]["torch"] == str(torch.__version__)
    assert (run_dir / "code.pickle").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("strategy", THREE)
def test_evaluations_come_by_the_epoch_and_by_the_second(inline: Fit, strategy: squall.Strategy) -> None:
    task = regression(examples=1600, validate=numbers(20))
    by_epoch = metrics(inline(task, strategy, epochs=3))
    assert [metric.name for metric in by_epoch] == ["loss"] * 3
    assert [metric.examples for metric in by_epoch] == sorted(metric.examples for metric in by_epoch)
    settings = dataclasses.replace(INLINE, evaluate_every_s=0.01)
    assert len(metrics(inline(task, strategy, epochs=3, settings=settings))) > 3


@pytest.mark.parametrize("strategy", THREE)
def test_seconds_end_a_run(inline: Fit, strategy: squall.Strategy) -> None:
    run = inline(regression(), strategy, epochs=10**6, seconds=0.05)
    plan = json.loads((run.directory / "run.json").read_text())["plan"]
    assert plan["settings"]["seconds"] == 0.05
    assert 0 < run.summary().examples < 10**6 * 90
    with pytest.raises(ValueError, match="seconds is -1: it must be positive"):
        inline(regression(), strategy, seconds=-1)


@pytest.mark.parametrize(
    ("strategy", "ended", "says"),
    [
        (squall.SingleProcess(), "steps", "Epoch 1, unfinished: 64 of 90 trained so far."),
        (DOWNPOUR, "steps", "Epoch 1, unfinished: 64 of 90 trained so far."),
        (squall.AllReduce(), "steps", "Epoch 1, unfinished: 64 of 90 trained so far."),
        (squall.Sandblaster(replicas=2, batch="full"), "steps", "on 90 examples"),
    ],
)
def test_the_record_tells_why_a_run_ended_and_the_audit_judges_by_it(
    inline: Fit, strategy: squall.Strategy, ended: str, says: str
) -> None:
    """Ten steps of a million epochs: what was never begun is not missed, and costs nothing."""
    run = inline(regression(), strategy, epochs=1_000_000, steps=10)
    assert run.summary().ended == ended
    assert "10" in str(run.summary().reason)
    reader = Reader(run.directory / "run.sqlite")
    found = audit(reader)
    reader.close()
    assert found.complete
    assert says in str(found)
    assert len(str(found).splitlines()) <= 3


def laborious(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """A metric that takes as long as dozens of steps."""
    far = torch.ones(400, 400)
    for _ in range(8):
        far = (far @ far).clamp(max=1.0)
    return far[0, 0].expand(len(batch[0]))


def test_an_evaluation_is_labelled_with_what_was_in_its_weights_and_when(run_dir: Path, without_report: None) -> None:
    """Training goes on while weights are measured: what is trained when the result comes is another thing."""
    task = regression(examples=16 * 1000, validate=numbers(64), metrics={"laborious": laborious})
    strategy = squall.Downpour(replicas=2, optimizer=partial(torch.optim.SGD, lr=0.05))
    settings = dataclasses.replace(LOCAL, evaluate_every_s=0.02)
    run = squall.fit(task, strategy, epochs=4, run_dir=run_dir, settings=settings)
    found = [metric for metric in metrics(run) if metric.name == "loss"]
    assert len(found) > 2
    assert [metric.examples for metric in found] == [16 * metric.updates for metric in found]
    assert found[-1].examples == 4 * 16 * 1000
    times = [metric.time_s for metric in found]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(run.summary().training_s, abs=0.01)


def test_a_run_does_not_wait_for_what_its_report_will_need(
    run_dir: Path, without_report: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is imported while it goes on, which takes seconds on a busy machine; so it hears a Ctrl-C."""
    begins, over = threading.Event(), threading.Event()
    monkeypatch.setattr(attending, "PREPARE_REPORT_AFTER_S", 0.0)
    monkeypatch.setattr(attending, "prepare_report", lambda: (begins.set(), over.wait()))
    try:
        run = squall.fit(regression(), DOWNPOUR, seconds=0.5, run_dir=run_dir, settings=LOCAL)
    finally:
        over.set()
    assert begins.is_set()
    assert run.summary().status == "finished"


def metrics(run: Run) -> list[MetricRow]:
    reader = Reader(run.directory / "run.sqlite")
    try:
        return list(reader.rows(MetricRow))
    finally:
        reader.close()
