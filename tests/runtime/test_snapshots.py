"""Snapshots appear whole or not at all, belong to one model, and a run goes on from them as if it had not stopped."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import squall
from squall.errors import SnapshotMismatch
from squall.record.rows import KEEP
from squall.report import Reader, audit
from squall.run import Run
from squall.runtime import rates
from squall.runtime.snapshot import Snapshots, second_name
from tests.tasks import INLINE, Noisy, assert_same, plain, regression, snapshot

Fit = Callable[..., Run]
ADAM = partial(torch.optim.Adam, lr=0.02)


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.2), nn.Linear(9, 1))


TASK = regression(normalized, train=Noisy(90), schedule=lambda optimizer: CosineAnnealingLR(optimizer, 30))


def again(run: Run, **options: Any) -> Run:
    return squall.resume(run.directory, **({"settings": INLINE} | options))


@pytest.mark.parametrize(
    "strategy",
    [
        squall.SingleProcess(optimizer=ADAM),
        squall.Downpour(replicas=1, shards=2, optimizer=ADAM),
        squall.Synchronous(replicas=1, shards=1, optimizer=ADAM),
        squall.Synchronous(replicas=3, shards=2, optimizer=ADAM),
    ],
    ids=["single", "downpour", "synchronous", "synchronous of three"],
)
def test_two_epochs_and_two_more_are_four_epochs_bit_for_bit(inline: Fit, strategy: squall.Strategy) -> None:
    straight = inline(TASK, strategy, epochs=4, seed=2)
    halved = inline(TASK, strategy, epochs=2, seed=2)
    assert_same(again(halved, epochs=4), straight, TASK)


@pytest.mark.parametrize(
    "strategy",
    [
        squall.Downpour(replicas=1, optimizer=ADAM),
        squall.DiLoCo(replicas=1, inner_steps=3, outer_momentum=0.0, optimizer=partial(torch.optim.SGD, lr=0.02)),
    ],
    ids=["of the shard", "of the replica"],
)
def test_a_run_that_goes_on_does_not_take_all_steps_of_its_schedule_again(
    inline: Fit, monkeypatch: pytest.MonkeyPatch, strategy: squall.Strategy
) -> None:
    monkeypatch.setattr(rates, "EVERY", 4)
    steps: list[None] = []
    step = CosineAnnealingLR.step
    monkeypatch.setattr(CosineAnnealingLR, "step", lambda *given: (steps.append(None), step(*given))[1])
    straight = inline(TASK, strategy, epochs=4)
    halved = inline(TASK, strategy, epochs=2)
    steps.clear()
    run = again(halved, epochs=4)
    assert len(steps) < 4 * 6, "not those of the first two epochs, of six batches each"
    assert_same(run, straight, TASK)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 5)])
def test_going_on_with_another_number_of_shards_changes_nothing(inline: Fit, before: int, after: int) -> None:
    straight = inline(TASK, squall.Downpour(replicas=1, shards=after, optimizer=ADAM), epochs=4)
    halved = inline(TASK, squall.Downpour(replicas=1, shards=before, optimizer=ADAM), epochs=2)
    run = again(halved, strategy=squall.Downpour(replicas=1, shards=after, optimizer=ADAM), epochs=4)
    assert_same(run, straight, TASK)


def test_a_run_stopped_within_an_epoch_goes_on_at_the_next_batch(inline: Fit) -> None:
    strategy = squall.Downpour(replicas=1, optimizer=ADAM)
    straight = inline(TASK, strategy, epochs=2)
    run = again(inline(TASK, strategy, steps=4), steps=None, epochs=2)
    assert_same(run, straight, TASK)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_going_on_with_another_number_of_replicas_trains_every_example_once(
    inline: Fit, before: int, after: int
) -> None:
    first = inline(TASK, squall.Downpour(replicas=before, optimizer=ADAM), steps=9)
    run = again(first, strategy=squall.Downpour(replicas=after, optimizer=ADAM), steps=None, epochs=3)
    reader = Reader(run.directory / "run.sqlite")
    assert str(audit(reader)).count("trained exactly once") == 1
    assert "Epochs 0 to 2: each of 90 examples" in str(audit(reader))
    reader.close()


def test_a_finished_run_has_nothing_to_go_on_with(inline: Fit) -> None:
    for strategy in (squall.Downpour(replicas=2), squall.SingleProcess()):
        run = inline(TASK, strategy, epochs=1)
        before = snapshot(run, TASK).tensors["weights"]
        assert torch.equal(snapshot(again(run), TASK).tensors["weights"], before)


def test_a_run_directory_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    """The launching process ends a run that has none, and might look too late."""
    written = Snapshots(tmp_path / "removed").write(1, 0, 1, {"weights": torch.zeros(3)}, (0, 3))
    assert written.error.startswith("FileNotFoundError")
    assert not (tmp_path / "removed").exists()


def test_only_the_last_two_are_kept_and_only_their_owner_reads_them(inline: Fit) -> None:
    settings = squall.Settings(launcher="inline", threads=1, progress=False, snapshot_every_s=0.05)  # virtual seconds
    run = inline(TASK, squall.Downpour(replicas=2, shards=2), epochs=6, settings=settings)
    snapshots = Snapshots(run.directory)
    numbers = snapshots.numbers()
    assert len(numbers) == KEEP == 2
    assert numbers[-1] > 3
    for path in (snapshots.directory / f"{numbers[-1]:06d}").glob("*.safetensors"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_half_written_is_never_read(inline: Fit) -> None:
    run = inline(TASK, squall.Downpour(replicas=2))
    snapshots = Snapshots(run.directory)
    numbers = snapshots.numbers()
    partial_ = snapshots.directory / f"{numbers[-1] + 1:06d}.partial"
    partial_.mkdir()
    (partial_ / "shard-0-of-1.safetensors").write_bytes(b"half")
    assert snapshots.numbers() == numbers
    weights = snapshot(run, TASK).tensors["weights"]
    assert torch.equal(weights, snapshot(again(run), TASK).tensors["weights"])
    assert not partial_.exists()


def test_another_model_is_refused_with_the_tensors_that_differ(inline: Fit) -> None:
    run = inline(regression(plain), squall.Downpour(replicas=2))
    other = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    with pytest.raises(squall.SnapshotMismatch) as caught:
        snapshot(run, regression(lambda: other))
    message = str(caught.value)
    assert "0.weight: [8, 6] here, [9, 6] there" in message
    assert "1.running_mean: [8] here, missing there" in message
    assert "2.bias" not in message, "it is the same"


def test_other_param_groups_are_another_model(inline: Fit) -> None:
    run = inline(regression(plain), squall.Downpour(replicas=2))
    swapped = regression(
        plain, groups=lambda model: [{"params": model[2].parameters()}, {"params": model[0].parameters()}]
    )
    with pytest.raises(squall.SnapshotMismatch, match="other param groups or another order"):
        snapshot(run, swapped)


def test_other_data_is_refused(inline: Fit) -> None:
    size = [90]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.tasks.EXAMPLES", size, raising=False)  # what the task function reads when it is called
        run = inline(reads_its_size, squall.Downpour(replicas=2), steps=4)
        size[0] = 40
        with pytest.raises(SnapshotMismatch, match="has 40 examples, and had 90 when the run began"):
            again(run, steps=9)


def reads_its_size() -> squall.Task:
    from tests import tasks

    return regression(examples=tasks.EXAMPLES[0])()


def damage_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_text('{"number": "one"')


def remove_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


def empty_ledger(directory: Path) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(manifest | {"ledger": {}}))


def damage_shard(directory: Path) -> None:
    (directory / "shard-1-of-2.safetensors").write_bytes(b"\0" * 40)


def flip_a_bit(directory: Path) -> None:
    path = directory / "shard-0-of-2.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def other_range(directory: Path) -> None:
    path = directory / "shard-1-of-2.safetensors"
    save_file(load_file(path), path, metadata={"start": "0", "stop": "1"})


def remove_shard(directory: Path) -> None:
    (directory / "shard-1-of-2.safetensors").unlink()


DAMAGES = [damage_manifest, remove_manifest, empty_ledger, damage_shard, remove_shard, flip_a_bit, other_range]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_snapshot_is_refused_by_its_name(inline: Fit, damage: Callable[[Path], None]) -> None:
    run = inline(TASK, squall.Downpour(replicas=2, shards=2))
    damage(Snapshots(run.directory).directory / "000001")
    with pytest.raises(squall.SnapshotMismatch, match=r"000001.*(manifest\.json|shard).*start a new run"):
        again(run, epochs=2)


@pytest.mark.parametrize("damage", [damage_manifest, flip_a_bit])
def test_a_run_goes_back_to_the_snapshot_before_a_damaged_one(
    inline: Fit, capfd: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    often = squall.Settings(launcher="inline", threads=1, progress=False, snapshot_every_s=0.05)  # virtual seconds
    run = inline(TASK, squall.Downpour(replicas=2, shards=2, optimizer=ADAM), epochs=3, settings=often)
    snapshots = Snapshots(run.directory)
    before, newest = snapshots.numbers()
    damage(snapshots.directory / f"{newest:06d}")
    longer = again(run, epochs=4)
    warning = capfd.readouterr().err
    assert f"{newest:06d}/" in warning
    assert f"going on from snapshot {before}" in warning
    assert (snapshots.directory / f"{newest:06d}.damaged").is_dir()
    reader = Reader(run.directory / "run.sqlite")
    assert str(audit(reader)).splitlines()[1:] == ["Epochs 0 to 3: each of 90 examples trained exactly once."]
    reader.close()
    replayed = squall.replay(run.directory, check=True)
    assert replayed.as_asked, str(replayed)
    assert all(torch.equal(a, b) for a, b in zip(replayed.model.parameters(), longer.model.parameters(), strict=True))


def test_a_snapshot_is_on_the_disk_before_it_shows_and_before_older_ones_go(
    inline: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []

    def told(what: str, owner: Any, name: str, place: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def tell(*given: Any, **named: Any) -> Any:
            done.append((what, Path(place(given[0])).name))
            return original(*given, **named)

        monkeypatch.setattr(owner, name, tell)

    told("synced", os, "fsync", lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}"))
    told("renamed", Path, "rename", str)
    told("removed", shutil, "rmtree", str)
    often = squall.Settings(launcher="inline", threads=1, progress=False, snapshot_every_s=0.05)
    inline(TASK, squall.Downpour(replicas=2, shards=2), epochs=6, settings=often)
    shown = done.index(("renamed", "000003.partial"))
    files = ["shard-0-of-2.safetensors", "shard-1-of-2.safetensors", "manifest.json", "000003.partial"]
    assert done[shown - 4 : shown] == [("synced", name) for name in files]
    assert done[shown + 1 : shown + 3] == [("synced", "snapshots"), ("removed", "000001")]


@pytest.mark.parametrize("files", [[], ["notes.txt"]])
def test_a_directory_without_a_run_cannot_be_resumed(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match="holds no run that can be resumed"):
        squall.resume(tmp_path)
    with pytest.raises(ValueError, match="holds no run that can be resumed"):
        squall.resume(tmp_path / "nothing")


def test_a_run_directory_that_exists_is_refused(inline: Fit, tmp_path: Path) -> None:
    run = inline(TASK, squall.SingleProcess())
    with pytest.raises(ValueError, match=f"squall resume {run.directory}"):
        inline(TASK, squall.SingleProcess(), run_dir=run.directory)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match=r"it is no run.*choose another run directory"):
        inline(TASK, squall.SingleProcess(), run_dir=tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    assert inline(TASK, squall.SingleProcess(), run_dir=tmp_path / "empty").summary().status == "finished"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EMLINK])
def test_where_there_are_no_links_a_second_name_is_a_copy(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(file: Path, name: Path) -> None:
        raise OSError(number, "no link")

    monkeypatch.setattr(os, "link", link)
    (tmp_path / "file").write_bytes(b"held")
    second_name(tmp_path / "file", tmp_path / "name")
    assert (tmp_path / "name").read_bytes() == b"held"
    assert (tmp_path / "name").stat().st_mode & 0o777 == 0o600


def test_a_second_name_takes_no_other_files_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"held")
    (tmp_path / "name").write_bytes(b"another")
    with pytest.raises(FileExistsError):
        second_name(tmp_path / "file", tmp_path / "name")
    assert (tmp_path / "name").read_bytes() == b"another"
