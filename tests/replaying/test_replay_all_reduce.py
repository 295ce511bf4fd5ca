"""A replay of all-reduce arrives at the weights of real processes, bit for bit, whoever died and joined on the way."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import squall
from squall.record.rows import MemberRow, ProgressRow
from squall.run import Run
from squall.runtime import schedule
from squall.runtime.schedule import ScheduleWriter, read
from squall.runtime.seeds import epoch_order
from tests import deep
from tests.launchers.blobs import EXAMPLES
from tests.launchers.processes import FILE, START_S, Started, wait_for
from tests.rehearsal import assert_replays, normalized, same
from tests.strategies.test_all_reduce import Matrices
from tests.tasks import LOCAL, Noisy, mean_square, numbers, regression

pytestmark = pytest.mark.usefixtures("without_report")
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
NUMBERED = TensorDataset(*numbers(90).tensors, torch.arange(90))


class Sometimes(nn.Module):
    """Uses some of its parameters for few batches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rarely = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.always(inputs)
        return found + self.rarely(inputs) if inputs[0, 0] > 0 else found


TASKS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "dropout, BatchNorm, augmentation and clipping": (normalized, SGD, {"train": Noisy(90), "clip_norm": 1.0}),
    "parameters that some batches do not use": (Sometimes, SGD, {}),
    "an optimizer of whole matrices": (Matrices, partial(torch.optim.Muon, lr=0.01), {}),
    "a schedule": (
        normalized, SGD,
        {"schedule": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9), "loader": {"num_workers": 1}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", deep.sweep(list(TASKS), 1))
@deep.only
def test_the_weights_of_three_processes_are_computed_again(name: str, run_dir: Path) -> None:
    """With three, the order of additions is the ring's; the last round of an epoch has no batch for some."""
    model, optimizer, options = TASKS[name]
    strategy = squall.AllReduce(replicas=3, optimizer=optimizer)
    run = squall.fit(regression(model, **options), strategy, epochs=3, run_dir=run_dir, settings=LOCAL)
    assert_replays(run)


def assert_replayed(directory: Path, weights: Path) -> None:
    """By the command."""
    flags = ("--check", "--output", str(weights))
    status, output, error = Started(directory, "replay", str(directory), *flags).finish(2 * START_S)
    assert status == 0, error + output
    assert "the same, bit for bit" in output
    found, wanted = load_file(weights), Run(directory).model.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def trained(run: Started) -> int:
    return sum(row.examples for row in run.rows(ProgressRow))


def interrupted(run: Started, victims: dict[str, str]) -> None:
    """Behind the death of each, when the newcomer in its place has trained."""
    try:
        run.wait_rows(ProgressRow, lambda row: row.replica == 1)
        for victim, newcomer in victims.items():
            run.kill(victim)
            run.wait_rows(MemberRow, lambda row, newcomer=newcomer: (row.node, row.change) == (newcomer, "joined"))
            before = trained(run)
            wait_for(lambda before=before: trained(run) > before, START_S, "progress with the newcomer")
        run.process.send_signal(signal.SIGINT)
        run.finish()
    finally:
        run.process.kill()
        wait_for(run.gone, 10, "the processes to end")


def finished_under_kills(run: Started, chance: random.Random) -> None:
    """Three processes of replicas are killed at any moment."""
    try:
        for moment in sorted(chance.randrange(4 * EXAMPLES) for _ in range(3)):
            wait_for(lambda moment=moment: trained(run) >= moment, START_S, f"{moment} examples")
            victims = sorted(role for role in run.processes() if role.startswith("replica"))
            with suppress(KeyError, ProcessLookupError):  # it is gone itself, from an earlier kill
                run.kill(chance.choice(victims))
        status, _, error = run.finish()
        assert status == 0, error
    finally:
        run.process.kill()
        wait_for(run.gone, 10, "the processes to end")


@deep.only
def test_deaths_newcomers_an_interrupt_and_a_resume(tmp_path: Path) -> None:
    """The first member dies, too, whose weights others take."""
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = Started.train(directory, "--strategy", "all_reduce", "--replicas", "3", "--epochs", "1000")
    interrupted(run, {"replica 1": "replica-1.1", "replica 0": "replica-0.1"})
    epochs = str(trained(run) // EXAMPLES + 1)
    status, _, error = Started(directory, "resume", str(directory), "--epochs", epochs, "--replicas", "2").finish()
    assert status == 0, error
    assert_replayed(directory, tmp_path / "weights")


@deep.only
@pytest.mark.parametrize("seed", deep.seeds(1, 4))
def test_kills_at_any_moment(tmp_path: Path, seed: int) -> None:
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = Started.train(directory, "--strategy", "all_reduce", "--replicas", "4", "--epochs", "6")
    finished_under_kills(run, random.Random(seed))
    assert_replayed(directory, tmp_path / "weights")


@deep.only
def test_a_run_that_was_killed_whole_is_replayed_to_where_it_was(tmp_path: Path) -> None:
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    flags = ("--strategy", "all_reduce", "--restarts", "0")
    run = Started(directory, "train", str(FILE), "--run-dir", str(directory), *flags)
    run.wait_rows(ProgressRow, lambda row: row.replica == 1)
    os.killpg(run.processes()["nursery"], signal.SIGKILL)
    run.finish()
    found = squall.replay(directory, check=True)
    assert found.difference is None
    assert found.fingerprints > 0


def rewrite(path: Path, records: Sequence[list[Any]]) -> None:
    """A schedule of these records, as its process had left it had it been killed behind them."""
    path.unlink()
    log = ScheduleWriter(path)
    for record in records:
        log.add(record)


@deep.only
def test_a_step_that_some_have_finished_counts_where_one_of_them_went_on(run_dir: Path) -> None:
    """The first member writes the last snapshot behind it, which the second has not lived to see."""
    strategy = squall.AllReduce(replicas=2, optimizer=SGD)
    run = squall.fit(regression(normalized), strategy, epochs=2, run_dir=run_dir, settings=LOCAL)
    updates = run.summary().updates
    first, second = (run_dir / "schedule" / "0" / f"replica-{index}.0" for index in range(2))
    ends = [index for index, record in enumerate(read(second)) if record[0] == schedule.MOVED]
    rewrite(second, list(read(second))[: ends[-1]])
    assert same(assert_replays(run).model, run.model)
    kept = [record for record in read(first) if record[0] not in (schedule.SAVED, schedule.ENDED)]
    rewrite(first, kept)
    assert squall.replay(run_dir).updates == updates - 1
    shutil.rmtree(run_dir / "snapshots")
    second.unlink()
    found = squall.replay(run_dir)
    assert (found.updates, f"{second} is not there" in found.stopped) == (0, True)


def poisoned(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    loss = mean_square(model, batch)
    return loss * math.nan if (batch[2] == 40).any() else loss


@deep.only
def test_a_replay_stops_at_an_update_and_at_the_batch_that_made_a_nan(run_dir: Path) -> None:
    strategy = squall.AllReduce(replicas=3, optimizer=SGD)
    with pytest.raises(squall.NotFinite):
        squall.fit(regression(train=NUMBERED, batch_size=4, loss=poisoned), strategy, run_dir=run_dir, settings=LOCAL)
    found = squall.replay(run_dir, around_nan=True).nan
    assert found is not None
    assert 40 in epoch_order(0, 0, 90)[found.start : found.stop]
    assert found.parameters
    models = [squall.replay(run_dir, until=number) for number in (0, 1)]
    assert [replayed.versions for replayed in models] == [(0,), (1,)]
    assert not same(models[0].model, models[1].model)


def test_what_is_not_as_it_was_is_found(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = squall.AllReduce(replicas=2, optimizer=SGD)
    run = squall.fit(regression(normalized), strategy, epochs=2, run_dir=run_dir, settings=replace(LOCAL, threads=1))
    path = run_dir / "schedule" / "0" / "replica-1.0"
    changed = list(read(path))
    third = [record for record in changed if record[0] == schedule.MOVED][2]
    third[1] ^= 1
    rewrite(path, changed)
    found = squall.replay(run.directory, check=True).difference
    assert found is not None
    assert found.update == 3
    assert [push.replica for push in found.pushes] == ["replica-0.0", "replica-1.0"]
