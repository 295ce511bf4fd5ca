"""A replay that begins at one of a run's last snapshots (`keep_schedule="last:3"`), and what is kept for it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import squall
from squall.cli import main
from squall.protocol.nodes import Node
from squall.replaying.replayed_nodes import ReplayedReplica
from squall.run import Run
from squall.runtime import replay_starts as cuts
from squall.runtime import schedule
from squall.runtime.records import Pushed
from squall.runtime.replay_starts import complete, home
from tests import deep
from tests.rehearsal import NOISY, rehearse, same
from tests.replaying.test_replay import FAMILY
from tests.tasks import INLINE, mean_square, numbers, regression

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


JITTERS_S = (0.004, 0.2)  # the second: shards far apart


@pytest.mark.parametrize("seed", deep.seeds(1, deep=3))
@pytest.mark.parametrize(("name", "jitter_s"), deep.sweep(list(product(STRATEGIES, JITTERS_S)), 3))
def test_a_replay_begins_at_any_snapshot_of_replicas_that_go_and_come(
    name: str, jitter_s: float, seed: int, tmp_path: Path
) -> None:
    strategy = STRATEGIES[name]
    shards = strategy.recipe().shards
    run = rehearse(
        tmp_path / "run", strategy, seed=seed, epochs=10, kill_at={80: 1, 500: 0, 650: 1},
        snapshots_every_s=0.1 if jitter_s < 0.1 else 1.0, keep_schedule="last:100", jitter_s=jitter_s,
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


# ---------------------------------------------------------------- what is kept


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "PIECE", 1 << 8)
    monkeypatch.setattr(schedule, "FIRST_BYTES", 1 << 7)


def taken(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@deep.only
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


@deep.only
def test_an_older_attempt_that_was_kept_in_whole_stays_and_is_replayed_alone(tmp_path: Path) -> None:
    path, strategy = tmp_path / "run", STRATEGIES["downpour"]
    rehearse(path, strategy, epochs=4)
    run = rehearse(path, strategy, epochs=14, again=True, keep_schedule="last:2", snapshots_every_s=0.1)
    assert sorted(attempt.name for attempt in (path / "schedule").iterdir()) == ["0", "1"]
    assert_replays_from(run, complete(path / "schedule" / "1", 2)[0])
    assert squall.replay(path, until=5).updates == 5
    (path / "schedule" / "0" / "start.json").write_text("{}")  # nothing of it is needed
    assert_replays_from(run, complete(path / "schedule" / "1", 2)[0])


@pytest.mark.parametrize(("listing", "of"), [("listdir", "schedule/0"), ("scandir", "schedule/0/from-*")])
@deep.only
def test_a_directory_that_another_process_removes_meanwhile_ends_nothing(
    listing: str, of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_directory, refused = getattr(os, listing), []

    def removed(path: Any = ".") -> Any:
        if Path(str(path)).match(of):
            refused.append(path)
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return list_directory(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, listing, removed)
        run = rehearse(
            tmp_path / "run", STRATEGIES["downpour"], epochs=10, keep_schedule="last:2", snapshots_every_s=0.1
        )
    assert refused
    assert squall.replay(run.directory, check=True).as_asked


@deep.only
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
    save, pushes = cuts.save_file, []

    def save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        pushes.append(int(path.parent.name.partition("-")[2]))
        if pushes[-1] in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path, metadata)

    monkeypatch.setattr(cuts, "save_file", save_file)
    run = rehearse(
        tmp_path / "run", STRATEGIES["downpour"], epochs=16, keep_schedule="last:100", snapshots_every_s=0.1
    )  # fmt: skip
    assert {2, 3} < set(pushes)
    assert "no replay will begin at snapshot 3: [Errno 28] No space left on device" in capfd.readouterr().err
    forget_before(run, 2, 2)
    assert_replays_from(run, 4)


def test_a_push_that_is_not_as_it_was_kept_is_said_and_the_replay_begins_later(tmp_path: Path) -> None:
    run = rehearse(tmp_path / "run", STRATEGIES["downpour"], epochs=16, keep_schedule="last:5", snapshots_every_s=0.1)
    attempt = run.directory / "schedule" / "0"
    first, second, third, *_ = complete(attempt, 2)
    for number, damage in ((first, lambda data: data[:-4] + b"abcd"), (second, lambda data: data[: len(data) // 2])):
        for push in home(attempt, number).glob("shard-0.0.replica-*"):
            data = push.read_bytes()
            push.unlink()  # it may be another snapshot's as well
            push.write_bytes(damage(data))
    replayed = assert_replays_from(run, third)
    assert replayed.as_asked
    assert len(replayed.passed) == 2
    assert "is damaged: its checksum is" in replayed.passed[0]
    assert "cannot be read: " in replayed.passed[1]
    assert f"it cannot begin sooner: {replayed.passed[1]}" in str(replayed)
    assert replayed.to_json_dict()["passed"] == list(replayed.passed)


@deep.only
def test_a_part_of_a_shard_that_is_missing_or_damaged_in_the_middle_is_begun_behind(tmp_path: Path) -> None:
    run = rehearse(tmp_path / "run", STRATEGIES["downpour"], epochs=24, keep_schedule="last:5", snapshots_every_s=0.1)
    attempt = run.directory / "schedule" / "0"
    _, second, third, fourth, fifth, *_ = complete(attempt, 2)
    (home(attempt, second) / "shard-0.0").write_bytes(b"")
    assert_replays_from(run, third)
    (home(attempt, fourth) / "shard-1.0").unlink()
    replayed = assert_replays_from(run, fifth)
    assert "shard-1.0 does not begin where what went before it ends" in "".join(replayed.passed)


@pytest.mark.parametrize(
    ("fetches", "missing", "damaged", "good"),
    [(0, None, None, 6), (2, None, 0, 4), (0, 1, None, 2), (4, 1, 0, 2), (0, None, 1, 2), (0, None, 2, 4)],
)
def test_the_parts_of_a_replica_are_read_from_the_cut_on_up_to_one_that_is_missing_or_damaged(
    fetches: int, missing: int | None, damaged: int | None, good: int, tmp_path: Path
) -> None:
    paths = [tmp_path / name for name in ("replica-0.0", "replica-0.0+1", "replica-0.0+2")]
    for number, path in enumerate(paths):
        log = schedule.ScheduleWriter(path)
        if number:
            log.add([schedule.PART, 2 * number, 2 * number])
        for _ in range(2):
            log.add([schedule.USED, 0, schedule.PUSHED, 1, 0])
        log.close()
        if number == damaged:
            path.write_bytes(b"")
    job: Any = SimpleNamespace(recipe=SimpleNamespace(replicas=1), task=SimpleNamespace(examples=90))
    side = ReplayedReplica(Node("replica", 0), [path for number, path in enumerate(paths) if number != missing], job)
    side.begin_before(fetches)
    found = list(side.whole())
    assert sum(isinstance(record, Pushed) for record in found) == good
    assert side.broken == (fetches == 0 and (missing == 1 or damaged == 1))


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


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        *((FAMILY[name], "replicas hold more") for name in ("averaging", "elastic averaging", "diloco")),
        (squall.SingleProcess(), "no fetch tells what is behind a snapshot"),
        (squall.Downpour(push_every=2, fetch_every=9), "each snapshot would have to keep the pushes of many"),
    ],
)  # fmt: skip
def test_strategies_that_cannot_begin_at_a_snapshot_or_would_keep_too_much_are_refused(
    inline: Fit, strategy: squall.Strategy, why: str
) -> None:
    settings, name = squall.Settings(launcher="inline", keep_schedule="last:3"), type(strategy).__name__
    with pytest.raises(ValueError, match=f"keep_schedule is 'last:3' with {name}, where {why}.*: give gigabytes"):
        inline(NOISY, strategy, settings=settings)


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
