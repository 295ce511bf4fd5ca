"""A replay arrives at the weights of the run, bit for bit, whatever the strategy and whatever happened to it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import squall
from squall.cli import main
from squall.run import Run
from squall.runtime.seeds import seed_everything
from squall.runtime.snapshot import Snapshots
from tests import deep
from tests.rehearsal import NOISY, assert_replays, rehearse, same
from tests.tasks import mean_square, regression

Fit = Callable[..., Run]
SGD = partial(torch.optim.SGD, lr=0.05)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.05)

FAMILY: dict[str, squall.Strategy] = {
    "synchronous": squall.Synchronous(replicas=3, shards=2, optimizer=MOMENTUM),
    "backup, drop": squall.Synchronous(replicas=3, backup=1, optimizer=SGD),
    "backup, fold": squall.Synchronous(replicas=3, backup=1, late="fold", optimizer=SGD),
    "bounded delay": squall.BoundedDelay(replicas=3, shards=2, max_delay=2, optimizer=MOMENTUM),
    "bounded delay, overlap": squall.BoundedDelay(replicas=3, shards=2, max_delay=1, overlap=True, optimizer=SGD),
    "downpour": squall.Downpour(replicas=3, shards=2, optimizer=ADAGRAD),
    "downpour, overlap": squall.Downpour(replicas=3, shards=2, overlap=True, optimizer=ADAGRAD),
    "downpour, summing": squall.Downpour(replicas=3, shards=2, push_every=3, fetch_every=2, optimizer=ADAGRAD),
    "downpour, all": squall.Downpour(
        replicas=3, shards=2, push_every=2, fetch_every=3, overlap=True, warm_start=32, optimizer=ADAGRAD
    ),
    "scaled": squall.AsynchronousSGD(replicas=3, shards=2, optimizer=SGD),
    "compensated": squall.AsynchronousSGD(replicas=3, shards=2, staleness="compensate", adaptive=0.9, optimizer=SGD),
    "delayed proximal": squall.DelayedProximal(replicas=3, shards=2, blocks=3, order="random", optimizer=SGD),
    "averaging": squall.Averaging(replicas=3, shards=2, every=4, optimizer=MOMENTUM),
    "elastic averaging": squall.ElasticAveraging(replicas=3, shards=2, every=4, optimizer=SGD),
    "diloco": squall.DiLoCo(replicas=3, shards=2, optimizer=ADAMW, inner_steps=3),
    "asynchronous diloco": squall.DiLoCo(replicas=3, optimizer=ADAMW, inner_steps=3, form="asynchronous"),
    "matched diloco": squall.DiLoCo(replicas=3, optimizer=ADAMW, inner_steps=4, form="asynchronous", matched=True),
    "decoupled diloco": squall.DiLoCo(replicas=3, optimizer=ADAMW, inner_steps=3, form="decoupled"),
}


@pytest.mark.parametrize("seed", deep.sweep([0, 1], 1))
@pytest.mark.parametrize("name", FAMILY)
def test_the_weights_are_the_same_with_replicas_of_changing_speed_and_one_that_dies(
    name: str, seed: int, tmp_path: Path
) -> None:
    run = rehearse(tmp_path / "run", FAMILY[name], seed=seed, epochs=5, kill_at={80 + 30 * seed: 1})
    assert (run.directory / "schedule" / "0" / "replica-1.1").exists(), "the dead one was replaced"
    assert_replays(run)


# ---------------------------------------------------------------- one moment


@pytest.mark.parametrize("shards", [1, 3])
def test_until_gives_the_weights_behind_that_update(shards: int, tmp_path: Path) -> None:
    strategy = squall.Downpour(replicas=3, shards=shards, push_every=2, optimizer=ADAGRAD)
    run = rehearse(tmp_path / "run", strategy, epochs=6, snapshots_every_s=0.2)
    snapshots = Snapshots(run.directory)
    manifest = snapshots.manifest(snapshots.numbers()[0])  # the last but one
    layout, found = manifest.layout, []
    assert manifest.versions[0] < squall.replay(run.directory).updates
    for version in manifest.versions:  # shards need not have made the same number of updates
        found.append(torch.zeros(layout.length))
        replayed = squall.replay(run.directory, until=version)
        assert replayed.versions == (version,) * shards
        layout.write_model(replayed.model, found[-1])
    model, weights = NOISY().model, torch.zeros(layout.length)
    layout.read_model(snapshots.restore(manifest.number, layout).tensors["weights"], model)
    layout.write_model(model, weights)  # which has whole counts
    for shard in range(shards):
        part = slice(*layout.shard_range(shard, shards))
        assert torch.equal(found[shard][part], weights[part])


def test_until_none_are_the_initial_weights_and_more_than_there_are_is_said(tmp_path: Path) -> None:
    run = rehearse(tmp_path / "run", FAMILY["downpour"], epochs=1)
    seed_everything(0)
    initial = NOISY().model
    assert same(squall.replay(run.directory, until=0).model, initial)
    replayed = squall.replay(run.directory, until=1000)
    assert "the run did not come to update 1000" in str(replayed)
    assert same(replayed.model, run.model)
    with pytest.raises(ValueError, match="until is -1: it must be 0 or more"):
        squall.replay(run.directory, until=-1)


# ---------------------------------------------------------------- resumed runs


def test_every_attempt_is_replayed_from_its_snapshot_though_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "run"
    rehearse(path, squall.Downpour(replicas=3, shards=2, optimizer=ADAGRAD), epochs=2)
    first = Snapshots(path).numbers()[-1]
    rehearse(path, squall.Downpour(replicas=2, shards=3, optimizer=ADAGRAD), epochs=4, again=True)
    run = rehearse(
        path, squall.Synchronous(replicas=2, optimizer=ADAGRAD), epochs=12, again=True, snapshots_every_s=0.1
    )
    assert first not in Snapshots(path).numbers(), "it was removed"
    replayed = assert_replays(run)
    middle = replayed.updates // 2
    assert not same(squall.replay(path, until=3).model, squall.replay(path, until=middle).model)
    assert same(squall.replay(path, until=replayed.updates).model, run.model)


def test_an_attempt_that_went_back_beyond_the_one_before_is_replayed_from_there(tmp_path: Path) -> None:
    """The second attempt died before a snapshot of its own, and the one that it had gone on from was damaged then."""
    path = tmp_path / "run"
    batches: list[int] = []

    def breaks(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        batches.append(1)
        if len(batches) > 7:
            raise OSError("once")
        return mean_square(model, batch)

    strategy = squall.Downpour(replicas=2, shards=2, optimizer=ADAGRAD)
    rehearse(path, strategy, regression(), epochs=4, snapshots_every_s=0.05)
    snapshots = Snapshots(path)
    older, newest = snapshots.numbers()
    with pytest.raises(OSError, match="once"):
        rehearse(path, strategy, regression(loss=breaks), epochs=6, again=True)
    file = snapshots.directory / f"{newest:06d}" / "shard-0-of-2.safetensors"
    file.write_bytes(file.read_bytes()[:-8] + bytes(8))
    run = rehearse(path, strategy, regression(), epochs=8, again=True)
    assert snapshots.numbers() == [older, newest], "its number was given again"
    replayed = assert_replays(run)
    assert older in replayed.snapshots
    for number in (older, newest):
        shutil.rmtree(snapshots.directory / f"{number:06d}")
    again = squall.replay(path, until=replayed.updates)
    assert not again.stopped
    assert same(again.model, replayed.model)


# ---------------------------------------------------------------- beside the family, and the command


def test_single_process_is_replayed_with_until_and_check(inline: Fit) -> None:
    run = inline(NOISY, squall.SingleProcess(optimizer=MOMENTUM), epochs=3)
    assert_replays(run)
    assert squall.replay(run.directory, until=7).updates == 7


@pytest.mark.parametrize("shards", [1, 2])
def test_l_bfgs_is_replayed_with_backup_portions_and_a_replica_that_dies(shards: int, tmp_path: Path) -> None:
    strategy = squall.Sandblaster(batch="full", replicas=3, shards=shards, portions=8, push_every=2)
    run = rehearse(tmp_path / "run", strategy, regression(), epochs=40, kill_at={60: 1})
    assert (run.directory / "schedule" / "0" / "replica-1.1").exists(), "the dead one was replaced"
    replayed = assert_replays(run)
    assert squall.replay(run.directory, until=replayed.updates // 2).updates == replayed.updates // 2


def test_where_the_weights_cannot_go_is_said_before_the_replay(
    inline: Fit, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = inline(NOISY, FAMILY["downpour"], epochs=1)
    older = tmp_path / "model.safetensors"
    older.write_text("older")
    command = ["replay", str(run.directory), "--output"]
    with monkeypatch.context() as patched:
        patched.setattr("squall.replaying.run.replay", None)
        for output, message in {
            older: "exists already: write over it with --force",
            tmp_path / "none" / "model": "there is no directory",
            tmp_path: "is a directory: choose another",
        }.items():
            assert main([*command, str(output)]) == 1
            assert message in capsys.readouterr().err
    assert older.read_text() == "older"
    assert main([*command, str(older), "--force"]) == 0
    assert load_file(older)
    assert main([*command, "/proc/self/model"]) == 1, "it is a directory, in which nobody can make a file"
    assert "--output /proc/self/model cannot be written" in capsys.readouterr().err


def test_the_command_says_what_was_compared_and_its_status_whether_it_differs(
    inline: Fit, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = inline(NOISY, FAMILY["downpour"], epochs=1)
    output = tmp_path / "model.safetensors"
    assert main(["replay", str(run.directory), "--check", "--output", str(output)]) == 0
    assert re.search(r"the same, bit for bit: \d+ updates and snapshot 1 compared", capsys.readouterr().out)
    saved = load_file(output)
    assert all(torch.equal(saved[name], value) for name, value in run.model.state_dict().items())
    assert main(["replay", str(run.directory), "--until", "9999"]) == 1
    assert "the run did not come to update 9999" in capsys.readouterr().out
    assert main(["replay", str(run.directory), "--until", "9999", "--check"]) == 1
    assert re.search(r"the same up to update \d+: \d+ updates", capsys.readouterr().out)
    for file in (run.directory / "snapshots").glob("*/shard-0*"):
        file.write_bytes(file.read_bytes()[:-4] + b"abcd")
    assert main(["replay", str(run.directory), "--check", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["difference"]["shard"] == 0
    assert main(["replay", str(tmp_path / "nothing")]) == 1
    assert "holds no run that can be resumed or replayed" in capsys.readouterr().err
