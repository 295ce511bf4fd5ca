"""A replay that begins at one of a run's last snapshots (`keep_schedule="last:3"`), and what is kept for it."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import squall
from squall.cli import main
from squall.protocol.nodes import Node
from squall.run import Run
from squall.runtime import cutting, schedule
from squall.runtime.cuts import complete, home
from tests import deep
from tests.rehearsal import NOISY, rehearse, same
from tests.tasks import INLINE, mean_square, numbers, regression
from tests.test_replay import FAMILY

Fit = Callable[..., Run]
ADAMW = partial(torch.optim.AdamW, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.02, momentum=0.5)
TRIO: dict[str, Any] = {"replicas": 3, "shards": 3, "optimizer": ADAMW}

STRATEGIES: dict[str, squall.Strategy] = {
    **{name: strategy for name, strategy in FAMILY.items() if strategy.recipe().work.local is None},
    "bounded delay": squall.BoundedDelay(replicas=3, shards=2, max_delay=2, optimizer=SGD),
    "a fetch for three pushes": squall.Downpour(push_every=2, fetch_every=7, overlap=True, **TRIO),
    "two fetches for a push": squall.Downpour(push_every=5, fetch_every=2, **TRIO),
    "two fetches for a push, overlap": squall.Downpour(push_every=5, fetch_every=2, overlap=True, **TRIO),
}


def forget_before(run: Run, number: int, shards: int) -> None:
    """As if the schedule had been kept from this snapshot on."""
    attempt = run.directory / "schedule" / "0"
    for shard in range(shards):
        (attempt / str(Node("shard", shard))).unlink(missing_ok=True)
    for older in complete(attempt, shards):
        if older < number:
            shutil.rmtree(home(attempt, older))


def assert_replays_from(run: Run, number: int) -> squall.Replayed:
    replayed = squall.replay(run.directory, check=True)
    assert replayed.snapshot == number
    assert replayed.difference is None, str(replayed)
    assert not replayed.stopped
    assert same(replayed.model, run.model)
    assert f"from snapshot {number} (update {replayed.since:,}) on" in str(replayed)
    return replayed


@pytest.mark.parametrize("seed", deep.seeds(1, deep=3))
@pytest.mark.parametrize("jitter_s", [0.004, 0.2], ids=["", "shards far apart"])
@pytest.mark.parametrize("name", deep.sweep(list(STRATEGIES), 8))
def test_a_replay_begins_at_any_snapshot_of_replicas_that_go_and_come(
    name: str, jitter_s: float, seed: int, tmp_path: Path
) -> None:
    strategy = STRATEGIES[name]
    shards = strategy.recipe().shards
    run = rehearse(
        tmp_path / "run", strategy, seed=seed, epochs=10, kill_at={80: 1, 500: 0, 650: 1},
        snapshots_every_s=0.15 if jitter_s < 0.1 else 0.8, keep_schedule="last:100", jitter_s=jitter_s,
    )  # fmt: skip
    assert squall.replay(run.directory, check=True).snapshot is None, "the run's start is there as well"
    found = complete(run.directory / "schedule" / "0", shards)
    compared = []
    for number in found:
        forget_before(run, number, shards)
        compared.append(assert_replays_from(run, number).fingerprints)
    assert compared[-1] == 0, "the last snapshot is the run's end"
    assert compared[0] > 0
    assert len(found) > 2


def test_a_lone_process_is_replayed_from_a_snapshot(inline: Fit) -> None:
    settings = squall.Settings(
        launcher="inline", threads=1, progress=False, keep_schedule="last:2", snapshot_every_s=0.01
    )
    run = inline(NOISY, squall.SingleProcess(optimizer=ADAMW), epochs=20, settings=settings)
    replayed = squall.replay(run.directory, check=True)
    assert replayed.snapshot is not None
    assert replayed.as_asked, str(replayed)
    assert same(replayed.model, run.model)


# ---------------------------------------------------------------- what is kept


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "PIECE", 1 << 8)
    monkeypatch.setattr(schedule, "FIRST_BYTES", 1 << 7)


def taken(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_what_is_kept_does_not_grow_with_the_run(tmp_path: Path, small_pieces: None) -> None:
    sizes, files = [], []
    for epochs in (20, 80):
        run = rehearse(
            tmp_path / f"run-{epochs}", STRATEGIES["downpour"], epochs=epochs, keep_schedule="last:2",
            snapshots_every_s=0.1, kill_at={at: at // 300 % 3 for at in range(300, 30 * epochs, 300)},
        )  # fmt: skip
        attempt = run.directory / "schedule" / "0"
        numbers = complete(attempt, 2)
        assert len(numbers) == 3, "the last two, and the one at the end of the run"
        assert not (attempt / "shard-0.0").exists()
        assert any("+" in path.name for path in attempt.glob("replica-*")), "a long schedule has parts"
        assert len({path.name.partition("+")[0] for path in attempt.glob("replica-*")}) <= 6, "two of each slot"
        assert_replays_from(run, numbers[0])
        sizes.append(taken(attempt))
        files.append(len(list(attempt.rglob("*"))))
    assert sizes[1] < 1.5 * sizes[0], "of a run that is four times as long"
    assert files[1] < 1.5 * files[0]


def test_older_attempts_go_when_newer_snapshots_suffice(tmp_path: Path) -> None:
    path, strategy = tmp_path / "run", STRATEGIES["downpour"]
    rehearse(path, strategy, epochs=10, keep_schedule="last:2", snapshots_every_s=0.1)
    run = rehearse(path, strategy, epochs=11, again=True, keep_schedule="last:2")
    first = complete(path / "schedule" / "0", 2)[0]
    assert_replays_from(run, first)  # across the resume
    run = rehearse(path, strategy, epochs=22, again=True, keep_schedule="last:2", snapshots_every_s=0.1)
    assert [attempt.name for attempt in (path / "schedule").iterdir()] == ["2"]
    assert_replays_from(run, complete(path / "schedule" / "2", 2)[0])


def test_where_something_is_missing_the_replay_begins_at_the_next_snapshot(tmp_path: Path) -> None:
    run = rehearse(
        tmp_path / "run", STRATEGIES["downpour"], epochs=24, keep_schedule="last:5", snapshots_every_s=0.1
    )  # fmt: skip
    attempt = run.directory / "schedule" / "0"
    first, second, third, fourth, fifth, *_ = complete(attempt, 2)
    assert_replays_from(run, first)
    for push in home(attempt, first).glob("shard-1.0.replica-*"):
        push.unlink()
    assert_replays_from(run, second)
    state = home(attempt, second) / "shard-0.0.safetensors"
    state.write_bytes(state.read_bytes()[:-4] + b"abcd")
    assert_replays_from(run, third)
    log = home(attempt, third) / "shard-0.0"
    log.write_bytes(log.read_bytes()[: schedule.BEGIN] + bytes(64))
    assert_replays_from(run, fourth)
    (home(attempt, fourth) / "shard-1.0").unlink()
    assert_replays_from(run, fifth)
    assert main(["replay", str(run.directory), "--until", "1"]) == 1
    for number in complete(attempt, 2):
        (home(attempt, number) / "shard-0.0.safetensors").unlink()
    with pytest.raises(ValueError, match=r"cannot be replayed: .*shard-0.0.safetensors cannot be read"):
        squall.replay(run.directory)


def test_a_disk_that_is_full_for_a_while_costs_the_snapshots_of_that_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save, pushes = cutting.save_file, []

    def save_file(tensors: dict[str, Tensor], path: Path) -> None:
        pushes.append(int(path.parent.name.partition("-")[2]))
        if pushes[-1] in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path)

    monkeypatch.setattr(cutting, "save_file", save_file)
    run = rehearse(
        tmp_path / "run", STRATEGIES["downpour"], epochs=16, keep_schedule="last:100", snapshots_every_s=0.1
    )  # fmt: skip
    assert {2, 3} < set(pushes)
    assert "no replay will begin at snapshot 3: [Errno 28] No space left on device" in capfd.readouterr().err
    forget_before(run, 2, 2)
    assert_replays_from(run, 4)


def test_what_was_pushed_before_is_what_was_kept(tmp_path: Path) -> None:
    run = rehearse(tmp_path / "run", STRATEGIES["downpour"], epochs=8, keep_schedule="last:2", snapshots_every_s=0.1)
    attempt = run.directory / "schedule" / "0"
    first = complete(attempt, 2)[0]
    push = min(home(attempt, first).glob("shard-0.0.replica-*"), key=lambda path: path.stat().st_mtime_ns)
    push.write_bytes(push.read_bytes()[:-4] + b"abcd")
    replayed = squall.replay(run.directory, check=True)
    assert replayed.difference is not None
    assert replayed.difference.shard == 0


def test_until_an_update_before_what_is_kept_is_refused(tmp_path: Path) -> None:
    task = regression(schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=7, gamma=0.8))
    run = rehearse(
        tmp_path / "run", STRATEGIES["downpour"], task, epochs=8, keep_schedule="last:1", snapshots_every_s=0.1
    )  # fmt: skip
    assert squall.replay(run.directory, check=True).as_asked
    with pytest.raises(ValueError, match=r"until is 3: the schedule is kept from snapshot \d+ \(update \d+\) on"):
        squall.replay(run.directory, until=3)
    replayed = squall.replay(run.directory)
    assert squall.replay(run.directory, until=replayed.updates - 2).updates == replayed.updates - 2


def test_the_batch_that_made_a_nan_is_found_from_the_last_snapshot(tmp_path: Path) -> None:
    """Long behind the run's start, which is not kept."""
    batches = []

    def breaks(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        batches.append(1)
        return mean_square(model, batch) * (
            float("nan") if (batch[0] == late).all(1).any() and len(batches) > 150 else 1
        )

    late = numbers(90).tensors[0][70]
    task = regression(loss=breaks)
    with pytest.raises(AssertionError, match="nonfinite"):
        rehearse(
            tmp_path / "run", STRATEGIES["downpour"], task, epochs=60, keep_schedule="last:1", snapshots_every_s=0.1
        )
    batches += [1] * 200
    replayed = squall.replay(tmp_path / "run", around_nan=True)
    assert replayed.snapshot is not None
    assert replayed.nan is not None
    assert (replayed.nan.batch[0] == late).all(1).any()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", ["averaging", "elastic averaging", "diloco"])
def test_strategies_whose_replicas_hold_more_than_they_fetched_are_refused(inline: Fit, name: str) -> None:
    settings = squall.Settings(launcher="inline", keep_schedule="last:3")
    with pytest.raises(ValueError, match=r"keep_schedule is 'last:3': replicas of .* hold more than they"):
        inline(NOISY, FAMILY[name], settings=settings)


@pytest.mark.parametrize("keep", ["last:0", "last:", "last:x", "last:-1", "3snapshots", -1.0])
def test_what_says_no_number_of_snapshots_is_refused(keep: Any) -> None:
    with pytest.raises(ValueError, match=r"keep_schedule is .*: give gigabytes, .*, or 'last:3'"):
        squall.Settings(keep_schedule=keep)


def test_a_script_is_told_what_to_use_instead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    assert main(["run", "--keep-schedule", "last:2", str(script)]) == 1
    assert "a script's loop may hold anything" in capsys.readouterr().err
    assert INLINE.keep_schedule == 2.0
