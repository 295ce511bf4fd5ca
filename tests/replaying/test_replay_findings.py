"""What a replay finds: the first difference, damage, and the batch that made a NaN."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import squall
from squall.cli import main
from squall.record.rows import MemberRow
from squall.record.writer import Record
from squall.run import Run
from squall.runtime import recording
from squall.runtime.schedule import BEGIN, COMPUTED, FORMAT, HEAD, ScheduleWriter
from squall.runtime.seeds import epoch_order
from squall.usercode.kept import load_code, write_plan
from tests.rehearsal import NOISY, assert_replays, normalized, rehearse, same
from tests.tasks import INLINE, Noisy, mean_square, numbers, regression

Fit = Callable[..., Run]
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.05)

FAMILY: dict[str, squall.Strategy] = {
    "synchronous": squall.Synchronous(replicas=3, shards=2, optimizer=MOMENTUM),
    "downpour": squall.Downpour(replicas=3, shards=2, optimizer=ADAGRAD),
    "averaging": squall.Averaging(replicas=3, shards=2, every=4, optimizer=MOMENTUM),
}


def test_a_byte_of_a_snapshot_that_changed_is_found_and_the_update_named(tmp_path: Path) -> None:
    run = rehearse(tmp_path / "run", FAMILY["downpour"])
    file = next((run.directory / "snapshots").glob("*/shard-1-of-2.safetensors"))
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(data)
    found = squall.replay(run.directory, check=True).difference
    assert found is not None
    assert (found.shard, found.update) == (1, run.summary().updates)
    assert re.search(r"in 1 of \d+ elements", found.what)
    assert len(found.pushes) == 1
    assert found.pushes[0].replica in ("replica-0.0", "replica-1.0", "replica-2.0")
    assert squall.replay(run.directory).difference is None, "nothing is compared unless that is asked for"


@pytest.mark.parametrize(("strategy", "pushes"), [("downpour", 1), ("synchronous", 3)])
def test_the_first_update_that_differs_is_named_with_its_replicas_batches_and_shard(
    strategy: str, pushes: int, tmp_path: Path
) -> None:
    """One example that is another now: nothing differs before the batch that it is in."""
    path = tmp_path / "run"
    rehearse(path, FAMILY[strategy])
    tampered = Noisy(90)
    tampered.inputs[int(epoch_order(0, 0, 90)[70])] += 1e-3  # in examples 64 to 80 of epoch 0
    code: Any = load_code(path)
    write_plan(path, {**code, "task": regression(normalized, train=tampered)})
    shutil.copy(path / "code.pickle", path / "schedule" / "0" / "code.pickle")
    found = squall.replay(path, check=True).difference
    assert found is not None
    assert len(found.pushes) == pushes
    batches = [batch for push in found.pushes for batch in push.batches]
    assert (0, 64, 80) in batches, str(found)
    untouched = rehearse(tmp_path / "untouched", FAMILY[strategy]).directory
    before, behind = found.update - 1, found.update
    assert same(squall.replay(path, until=before).model, squall.replay(untouched, until=before).model)
    assert not same(squall.replay(path, until=behind).model, squall.replay(untouched, until=behind).model)


def test_where_the_results_may_differ_it_is_said_and_gone_on(tmp_path: Path) -> None:
    run = rehearse(tmp_path / "run", FAMILY["downpour"])
    path = run.directory / "schedule" / "0" / "start.json"
    start = json.loads(path.read_text())
    start["where"] |= {"torch": "1.0.0", "CPU": "Z80"}
    path.write_text(json.dumps(start))
    replayed = squall.replay(run.directory)
    assert f"torch is {torch.__version__} here and was 1.0.0" in str(replayed)
    assert len(replayed.elsewhere) == 2
    assert same(replayed.model, run.model)


# ---------------------------------------------------------------- bad input


def test_a_damaged_schedule_is_replayed_up_to_the_damage(tmp_path: Path) -> None:
    run = rehearse(tmp_path / "run", FAMILY["downpour"])
    file = run.directory / "schedule" / "0" / "replica-1.0"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    replayed = squall.replay(run.directory, check=True)
    assert re.search(r"replica-1.0 is damaged at record \d+ \(byte \d+\)", replayed.stopped)
    assert replayed.difference is None, "what comes before is as it was"
    assert 0 < replayed.updates < (run.summary().updates or 0)


@pytest.mark.parametrize("name", ["replica-1.0", "shard-1.0"])
def test_a_schedule_that_was_cut_off_or_is_gone_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "WRITTEN_TOGETHER", 1)
    run = rehearse(tmp_path / "run", FAMILY["downpour"])
    file = run.directory / "schedule" / "0" / name
    file.write_bytes(cut_to_whole_records(file, 4))
    replayed = squall.replay(run.directory, check=True)
    assert f"{name} is cut off" in replayed.stopped
    assert replayed.difference is None
    assert 0 < replayed.updates < (run.summary().updates or 0)
    file.unlink()
    replayed = squall.replay(run.directory)
    assert name in replayed.stopped
    assert min(replayed.versions) < 10


@pytest.mark.parametrize("name", ["replica-1.0", "shard-1.0"])
def test_a_schedule_that_was_lost_with_its_machine_is_said_to_be(name: str, tmp_path: Path) -> None:
    run = rehearse(tmp_path / "run", FAMILY["downpour"])
    (run.directory / "schedule" / "0" / name).unlink()
    why = "machine 1 was lost: nothing was heard of it for 2 s"
    with contextlib.closing(Record(run.directory / "run.sqlite")) as record:
        record.add(MemberRow(name, 0, 1.0, "lost", why))
    assert f"{name} is not there: {why}" in squall.replay(run.directory).stopped


def test_a_check_of_a_schedule_that_breaks_off_does_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "WRITTEN_TOGETHER", 1)
    run = rehearse(tmp_path / "run", FAMILY["downpour"])
    home, command = run.directory / "schedule" / "0", ["replay", str(run.directory)]
    (home / "replica-1.0").write_bytes(cut_to_whole_records(home / "replica-1.0", 4))
    assert main([*command, "--check"]) == 1
    assert re.search(r"the same up to update [1-9]\d*: ", capsys.readouterr().out)
    assert main(command) == 0, "as far as it goes is what was asked for"
    capsys.readouterr()
    for name in ("shard-0.0", "shard-1.0"):
        (home / name).unlink()
    assert main([*command, "--check"]) == 1
    output = capsys.readouterr().out
    assert "no update was compared" in output
    assert "same" not in output


def cut_to_whole_records(path: Path, count: int) -> bytes:
    data = path.read_bytes()
    at = BEGIN
    for _ in range(count):
        at += HEAD + data[at]
    return data[:at]


def test_a_run_may_keep_no_schedule(inline: Callable[..., Run]) -> None:
    none = dataclasses.replace(INLINE, keep_schedule=0)
    run = inline(NOISY, FAMILY["downpour"], epochs=1, settings=none)
    with pytest.raises(ValueError, match=r"schedule/0 holds no schedule: .* --keep-schedule none"):
        squall.replay(run.directory)
    kept = squall.resume(run.directory, epochs=2, settings=INLINE)
    squall.resume(kept.directory, epochs=3, settings=none)
    with pytest.raises(ValueError, match="holds no schedule"):
        squall.replay(run.directory)


def test_another_version_and_no_schedule_at_all_are_refused_with_the_reason(tmp_path: Path) -> None:
    run = rehearse(tmp_path / "run", FAMILY["downpour"])
    start = run.directory / "schedule" / "0" / "start.json"
    start.write_text(start.read_text().replace(f'"format": {FORMAT}', '"format": 99'))
    with pytest.raises(
        ValueError, match=f"is a schedule of format 99, and this version of Squall reads format {FORMAT}"
    ):
        squall.replay(run.directory)
    start.write_text("{")
    with pytest.raises(ValueError, match=r"start.json cannot be read"):
        squall.replay(run.directory)
    shutil.rmtree(run.directory / "schedule")
    with pytest.raises(
        ValueError, match="has no schedule: nothing was trained, its disk was full, or an older version"
    ):
        squall.replay(run.directory)
    with pytest.raises(ValueError, match="holds no run"):
        squall.replay(tmp_path / "nowhere")


def test_a_run_that_died_before_its_first_snapshot_is_begun_anew_in_the_replay_too(tmp_path: Path) -> None:
    path = tmp_path / "run"
    rehearse(path, FAMILY["downpour"], epochs=1)
    shutil.rmtree(path / "snapshots")
    run = rehearse(path, FAMILY["downpour"], epochs=2, seed=1, again=True)
    assert_replays(run)


def test_a_damaged_later_attempt_is_said_and_those_before_it_are_replayed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    rehearse(path, FAMILY["downpour"], epochs=2)
    before = squall.replay(path)
    rehearse(path, FAMILY["downpour"], epochs=4, again=True)
    (path / "schedule" / "1" / "start.json").write_text("{}")
    replayed = squall.replay(path)
    assert "start.json cannot be read" in replayed.stopped
    assert same(replayed.model, before.model)


@pytest.fixture
def few_files() -> Iterator[None]:
    """Fifty more than are open now."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 50, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def with_incarnations(run: Run, count: int) -> None:
    """As if replica 0 had died so often; each of its processes has computed a batch that it did not push."""
    for incarnation in range(1, count + 1):
        log = ScheduleWriter(run.directory / "schedule" / "0" / f"replica-0.{incarnation}")
        log.add([COMPUTED, 0b101, 1, 0, 0, 16])
        log.close()


def test_a_replay_needs_no_more_open_files_than_processes_lived_at_once(tmp_path: Path, few_files: None) -> None:
    run = rehearse(tmp_path / "run", FAMILY["downpour"])
    with_incarnations(run, 60)
    assert_replays(run)


def test_of_many_damaged_files_one_is_named_and_the_others_are_counted(tmp_path: Path) -> None:
    run = rehearse(tmp_path / "run", FAMILY["downpour"])
    with_incarnations(run, 40)
    for path in (run.directory / "schedule" / "0").glob("replica-0.[1-9]*"):
        path.write_bytes(b"")
    stopped = squall.replay(run.directory).stopped
    assert "replica-0.1 is cut off: it holds 0 bytes" in stopped
    assert "39 more files" in stopped


# ---------------------------------------------------------------- a task that fails


def open_schedules(run_dir: Path) -> list[str]:
    paths = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            paths.append(str(link.readlink()))
    return [path for path in paths if path.startswith(str(run_dir / "schedule"))]


class FailsOnce:
    """A loss whose n-th batch raises."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("a mistake in the task")
        return mean_square(model, batch)


@pytest.mark.parametrize("strategy", [*FAMILY.values(), squall.SingleProcess()])
def test_a_loss_that_raises_leaves_no_schedule_open_and_what_was_done_is_replayed(
    inline: Fit, strategy: squall.Strategy, run_dir: Path
) -> None:
    with pytest.raises(RuntimeError, match="a mistake in the task"):
        inline(regression(loss=FailsOnce(2)), strategy, epochs=1, run_dir=run_dir)
    assert open_schedules(run_dir) == []
    replayed = squall.replay(run_dir, check=True)
    assert replayed.difference is None
    assert not replayed.stopped


# ---------------------------------------------------------------- NaN


def numbered() -> TensorDataset:
    return TensorDataset(*numbers(90).tensors, torch.arange(90))


class Root(nn.Module):
    """NaN for inputs that are negative."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.sqrt()


NAN_STRATEGIES = {"downpour": FAMILY["downpour"], "averaging": FAMILY["averaging"], "single": squall.SingleProcess()}


@pytest.mark.parametrize("name", NAN_STRATEGIES)
def test_around_nan_stops_at_the_batch_and_shows_where_it_comes_from(inline: Fit, name: str, run_dir: Path) -> None:
    model = lambda: nn.Sequential(nn.Linear(1, 1), Root(), nn.Linear(1, 1))  # noqa: E731
    inputs = torch.ones(90, 1)
    inputs[40] = -1e6
    task = regression(model, train=TensorDataset(inputs.abs() * 1e-3 + inputs.clamp(max=0), torch.zeros(90, 1)))

    def positive() -> squall.Task:
        built = task()
        built.model[0].weight.data.fill_(1.0)  # type: ignore[index,union-attr]
        built.model[0].bias.data.fill_(1.0)  # type: ignore[index,union-attr]
        return built

    with pytest.raises(squall.NotFinite):
        inline(positive, NAN_STRATEGIES[name], epochs=2, run_dir=run_dir)
    found = squall.replay(run_dir, around_nan=True).nan
    assert found is not None
    order = epoch_order(0, found.epoch, 90)
    assert torch.equal(order[found.start : found.stop] == 40, found.batch[0][:, 0] < 0)
    assert found.module == "1 (Root)"
    assert found.inputs_finite
    assert math.isnan(found.loss)
    assert set(found.parameters) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert "first output that is not finite: of 1 (Root), on finite inputs" in str(found)
    assert all(weights.isfinite().all() for weights in found.model.parameters())
    assert task().loss(found.model, found.batch).isnan(), "a debugger can go on from there"


def test_a_batch_that_is_only_nan_once_is_tried_again_in_the_replay_as_well(inline: Fit, tmp_path: Path) -> None:
    """The first try is a function of weights and batch; the second was on other weights."""
    seen = [0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = mean_square(model, batch)
        if model.training and (batch[2] == 40).any() and seen[0] < 1:
            seen[0] += 1
            return value * math.nan
        return value

    run = inline(regression(normalized, train=numbered(), loss=loss), FAMILY["downpour"], epochs=2)
    assert_replays(run)
    assert squall.replay(run.directory, around_nan=True).nan is not None


def test_a_run_without_a_nan_is_replayed_to_its_end(inline: Fit) -> None:
    run = inline(NOISY, FAMILY["downpour"], epochs=1)
    replayed = squall.replay(run.directory, around_nan=True)
    assert replayed.nan is None
    assert "no batch made a NaN or Inf" in str(replayed)
    assert same(replayed.model, run.model)
