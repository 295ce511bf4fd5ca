"""A batch that gives a NaN is not applied: it is tried once more, then the run stops and keeps what is good."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import squall
from squall.cli import main
from squall.record.rows import EventRow, SkipRow
from squall.report import Reader
from squall.report.coverage import audit
from squall.report.html import write_report
from squall.run import Run
from squall.runtime.snapshot import Snapshots
from tests import deep
from tests.tasks import mean_square, numbers, regression, snapshot

Fit = Callable[..., Run]
DOWNPOUR = squall.Downpour(replicas=2, shards=2, optimizer=partial(torch.optim.SGD, lr=0.05))


def poisoned(times: int, at: float = 40.0) -> tuple[Callable[[nn.Module, Any], Tensor], list[int]]:
    """A loss that is NaN for the batch with example 40, the first so many times."""
    seen = [0]

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        value = mean_square(model, batch)
        if model.training and (batch[2] == at).any() and (seen[0] < times):
            seen[0] += 1
            return value * float("nan")
        return value

    return loss, seen


def numbered() -> TensorDataset:
    return TensorDataset(*numbers(90).tensors, torch.arange(90))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def events(run_dir: Path, kind: str) -> list[str]:
    reader = Reader(run_dir / "run.sqlite")
    try:
        return [event.text for event in reader.rows(EventRow) if event.kind == kind]
    finally:
        reader.close()


STRATEGIES = {
    "single": squall.SingleProcess(),
    "downpour": DOWNPOUR,
    "summing": squall.Downpour(replicas=2, push_every=3, fetch_every=2, optimizer=DOWNPOUR.optimizer),
    "overlap": squall.Downpour(replicas=2, overlap=True, optimizer=DOWNPOUR.optimizer),
    "synchronous": squall.Synchronous(replicas=3, optimizer=DOWNPOUR.optimizer),
    "all-reduce": squall.AllReduce(replicas=3, optimizer=DOWNPOUR.optimizer),
    "averaging": squall.Averaging(replicas=2, every=4, optimizer=DOWNPOUR.optimizer),
    "elastic": squall.ElasticAveraging(replicas=2, every=4, optimizer=DOWNPOUR.optimizer),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
def test_a_batch_that_stays_nan_ends_the_run_with_its_name_and_the_weights_before_it(
    inline: Fit, strategy: squall.Strategy, run_dir: Path
) -> None:
    loss, seen = poisoned(times=1000)
    task = regression(normalized, train=numbered(), loss=loss)
    with pytest.raises(squall.NotFinite, match=r"examples \d+ to \d+ of epoch 0 \(lease \d+\)") as caught:
        inline(task, strategy, epochs=3, run_dir=run_dir)
    assert seen[0] in (2, 4), "it is tried once more; another replica may have met it in the next epoch meanwhile"
    assert len(events(run_dir, "nonfinite")) == seen[0], "all are counted"
    assert str(run_dir / "snapshots") in str(caught.value)
    assert Snapshots(run_dir).numbers()
    assert snapshot(Run(run_dir, task), task).tensors["weights"].isfinite().all()


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
def test_a_nan_that_goes_away_is_survived(inline: Fit, strategy: squall.Strategy, run_dir: Path) -> None:
    loss, seen = poisoned(times=1)
    task = regression(normalized, train=numbered(), loss=loss)
    run = inline(task, strategy, epochs=2, run_dir=run_dir)
    assert seen[0] == 1
    assert len(events(run_dir, "nonfinite")) == 1
    assert run.summary().examples == 180
    assert snapshot(run, task).tensors["weights"].isfinite().all()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_that_overflows_on_a_replica_never_reaches_the_others(inline: Fit, replicas: int, run_dir: Path) -> None:
    """The gradient is finite, and the weights after the replica's own step are not."""
    strategy = squall.Averaging(replicas=replicas, every=4, optimizer=partial(torch.optim.SGD, lr=1e38))
    task = regression(train=numbered())
    with pytest.raises(squall.NotFinite):
        inline(task, strategy, epochs=3, run_dir=run_dir)
    weights = snapshot(Run(run_dir, task), task).tensors["weights"]
    assert weights.isfinite().all()
    assert weights.abs().max() < 1e6


def test_bad_numbers_in_the_data_do_not_get_into_the_statistics(inline: Fit) -> None:
    """BatchNorm's forward has averaged the NaN by the time that the loss shows it; the retry begins afresh."""
    bad = [True]

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        inputs = batch[0]
        if (batch[2] == 40).any() and model.training and torch.is_grad_enabled() and bad[0]:
            bad[0] = False
            inputs = inputs * float("nan")
        return mean_square(model, [inputs, batch[1]])

    for strategy in STRATEGIES.values():
        bad[0] = True
        model = inline(regression(normalized, train=numbered(), loss=loss), strategy, epochs=1).model
        assert model[1].running_mean.isfinite().all(), strategy


# ---------------------------------------------------------------- left out


SKIPS = {name: STRATEGIES[name] for name in STRATEGIES if name not in ("single", "all-reduce")}


@pytest.mark.parametrize("strategy", SKIPS.values(), ids=list(SKIPS))
def test_a_batch_that_stays_nan_is_left_out_and_named_and_the_run_is_replayed(
    inline: Fit, strategy: squall.Strategy, run_dir: Path
) -> None:
    loss, seen = poisoned(times=1000)
    task = regression(normalized, train=numbered(), loss=loss)
    run = inline(task, strategy, epochs=2, run_dir=run_dir, on_nan="skip")
    assert seen[0] == 4, "twice in each epoch"
    assert run.summary().ended == "data"
    assert run.summary().examples == 180 - 2 * 16
    assert snapshot(run, task).tensors["weights"].isfinite().all()
    with closing(Reader(run_dir / "run.sqlite")) as reader:
        found = audit(reader)
        skips = reader.rows(SkipRow)
    assert found.complete
    assert [skip.why for skip in skips] == ["nonfinite"] * 2
    assert [sum(map(len, epoch.quarantined)) for epoch in found.epochs] == [16, 16]
    places = [f"{skip.start} to {skip.stop - 1}" for skip in sorted(skips, key=lambda skip: skip.epoch)]
    assert all(f"Left out as they gave NaN or Inf twice: 16, at {place}" in str(found) for place in places)
    texts = [text for text in events(run_dir, "nonfinite") if "left out, number 1 of at most 3 an epoch" in text]
    assert len(texts) == 2
    assert "Left out as they gave NaN or Inf twice" in write_report(run_dir).read_text()
    assert "the same, bit for bit" in str(squall.replay(run_dir, check=True))


def test_a_run_that_has_stopped_at_a_batch_goes_on_without_it(inline: Fit, run_dir: Path) -> None:
    task = regression(normalized, train=numbered(), loss=poisoned(times=1000)[0])
    with pytest.raises(squall.NotFinite):
        inline(task, DOWNPOUR, epochs=2, run_dir=run_dir)
    assert main(["resume", str(run_dir), "--on-nan", "skip", "--as-it-was"]) == 0
    with closing(Reader(run_dir / "run.sqlite")) as reader:
        found = audit(reader)
    assert [sum(map(len, epoch.quarantined)) for epoch in found.epochs] == [16, 16]
    assert found.complete


def test_more_than_may_be_left_out_end_the_run(inline: Fit, run_dir: Path) -> None:
    task = regression(normalized, train=numbered(), loss=lambda model, batch: mean_square(model, batch) * float("nan"))
    with pytest.raises(squall.NotFinite, match=r"of this epoch were left out before it examples 0 to 16, \d+ to \d+"):
        inline(task, DOWNPOUR, run_dir=run_dir, on_nan="skip:2")


def test_weights_that_are_not_finite_end_the_run_at_once(inline: Fit, run_dir: Path) -> None:
    """No batch is to blame, so that none is left out."""
    strategy = squall.Averaging(replicas=2, every=4, optimizer=partial(torch.optim.SGD, lr=1e38))
    with pytest.raises(squall.NotFinite, match="it is not left out: the weights are not finite"):
        inline(regression(train=numbered()), strategy, epochs=3, run_dir=run_dir, on_nan="skip")
    assert not any("left out, number" in text for text in events(run_dir, "nonfinite"))


@pytest.mark.parametrize("strategy", [squall.SingleProcess(), squall.AllReduce(), squall.Sandblaster()])
def test_what_takes_no_step_without_a_batch_leaves_none_out(strategy: squall.Strategy) -> None:
    with pytest.raises(ValueError, match=r"on_nan is 'skip'.*leave it out, or use a strategy that deals leases"):
        squall.fit(lambda: regression(), strategy, on_nan="skip")


@pytest.mark.parametrize("wrong", ["skip:0", "skip:", "skip:x", "stop:3", "ignore"])
def test_a_wrong_setting_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="on_nan is"):
        squall.Settings(on_nan=wrong)


def test_how_many_may_be_left_out() -> None:
    limits = [squall.Settings(on_nan=each).quarantine(20_000) for each in ("stop", "skip", "skip:7")]
    assert limits == [0, 20, 7]
    assert squall.Settings(on_nan="skip").quarantine(10) == 3


@deep.only
def test_a_script_is_handed_the_next_batch_where_one_is_left_out(run_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(
        "import torch, squall\n"
        "from torch.utils.data import TensorDataset\n"
        "data = TensorDataset(torch.ones(60, 3), torch.arange(60))\n"
        "model = torch.nn.Linear(3, 1)\n"
        "session = squall.join(model, lambda p: torch.optim.SGD(p, lr=0.1))\n"
        "for inputs, numbers in session.batches(data, batch_size=6, epochs=2):\n"
        "    loss = model(inputs).square().mean() * (float('nan') if 40 in numbers else 1.0)\n"
        "    loss.backward()\n"
        "    session.step(loss)\n"
    )
    command = [
        sys.executable,
        "-m",
        "squall",
        "run",
        "--replicas",
        "2",
        "--on-nan",
        "skip",
        "--run-dir",
        run_dir,
        script,
    ]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    with closing(Reader(run_dir / "run.sqlite")) as reader:
        found = audit(reader)
    assert found.complete
    assert [sum(map(len, epoch.quarantined)) for epoch in found.epochs] == [6, 6]
