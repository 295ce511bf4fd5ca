"""All-reduce when processes die or are stopped: real processes, real signals."""

from __future__ import annotations

import os
import random
import re
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import squall
from squall.cli import main
from squall.record.rows import MemberRow, ProgressRow
from squall.report import Reader, audit
from squall.run import Run
from squall.runtime.evaluate import evaluate
from squall.runtime.seeds import epoch_order
from squall.runtime.snapshot import Snapshots
from squall.task import TaskFunction
from tests import deep
from tests.launchers.blobs import EXAMPLES
from tests.launchers.processes import FILE, START_S, Started, training_all, wait_for
from tests.strategies.test_all_reduce import Lars, Matrices
from tests.tasks import LOCAL, difference, mean_square, numbers, regression

ENDLESS = 100_000


@contextmanager
def training(directory: Path, replicas: int, epochs: int = ENDLESS, *flags: str) -> Iterator[Started]:
    """So many replicas that have all trained."""
    size = ("--replicas", str(replicas), "--epochs", str(epochs))
    run = Started.train(directory / f"run-{uuid4().hex[:8]}", "--strategy", "all_reduce", *size, *flags)
    with training_all(run, replicas):
        yield run


def examples(run: Started) -> int:
    return sum(row.examples for row in run.rows(ProgressRow))


def check_end(run: Started, epochs: int) -> None:
    """It ends well, and each example of each epoch was trained once."""
    status, _, err = run.finish()
    assert status == 0, err
    assert examples(run) == epochs * EXAMPLES
    with closing(Reader(run.directory / "run.sqlite")) as reader:
        found = audit(reader)
    assert [span for epoch in found.epochs for span in epoch.spans if (len(span), span.times) != (EXAMPLES, 1)] == []
    assert sum(len(epoch) for epoch in found.epochs) == epochs


KILLS = [
    (2, ["replica 0"]),  # whose weights the others would take
    (2, ["replica 1"]),
    (5, ["replica 0", "replica 3"]),
    (3, ["replica 0", "replica 2"]),
    (5, ["replica 3"]),
    (3, ["replica 1"]),
]


@deep.only
@pytest.mark.parametrize(("replicas", "victims"), deep.sweep(KILLS, 1))
def test_killed_replicas_are_replaced_and_no_example_is_lost(tmp_path: Path, replicas: int, victims: list[str]) -> None:
    with training(tmp_path, replicas, 12) as run:  # long enough for newcomers on a loaded machine
        old = run.processes()
        for victim in victims:
            os.kill(old[victim], signal.SIGKILL)
        check_end(run, 12)
        newcomers = {int(victim.split()[1]): f"replica-{victim.split()[1]}.1" for victim in victims}
        changes = {(row.node, row.change): row for row in run.rows(MemberRow)}
        for index, node in newcomers.items():
            assert "SIGKILL" in changes[node.replace(".1", ".0"), "lost"].why
            joined = changes[node, "joined"]
            assert [row for row in run.rows(ProgressRow) if row.replica == index and row.time_s > joined.time_s]


@deep.only
@pytest.mark.parametrize("seed", deep.seeds(1, 6))
def test_kills_at_any_moment_lose_no_example(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with training(tmp_path, 3, 10) as run:
        moments = sorted(chance.randrange(6 * EXAMPLES) for _ in range(3))
        for moment in moments:
            wait_for(lambda moment=moment: examples(run) >= moment, START_S, f"{moment} examples")
            victims = sorted(role for role in run.processes() if role.startswith("replica"))
            with suppress(KeyError, ProcessLookupError):  # it is gone itself, from an earlier kill
                run.kill(chance.choice(victims))
        check_end(run, 10)


SHARES = ("--shard-optimizer", "--optimizer", "adamw", "--lr", "0.001")


@pytest.mark.parametrize(("replicas", "victim"), deep.sweep([(3, "replica 0"), (2, "replica 1"), (4, "replica 2")], 1))
def test_a_killed_replica_takes_no_share_of_the_optimizers_state_with_it(
    tmp_path: Path, replicas: int, victim: str
) -> None:
    with training(tmp_path, replicas, 4, *SHARES, *SNAPSHOTS) as run:
        run.kill(victim)
        check_end(run, 4)
        lost = next(row for row in run.rows(MemberRow) if row.change == "lost")
        assert any(row for row in run.rows(MemberRow) if row.change == "joined" and row.time_s > lost.time_s)


@deep.only
def test_neighbours_that_die_at_once_end_the_run_with_the_remedy(tmp_path: Path) -> None:
    with training(tmp_path, 3, ENDLESS, *SHARES, *SNAPSHOTS) as run:
        snapshots = Snapshots(run.directory)
        wait_for(snapshots.numbers, START_S, "a snapshot")
        processes = run.processes()
        for victim in ("replica 0", "replica 1"):
            os.kill(processes[victim], signal.SIGKILL)
        status, _, err = run.finish()
    assert status == 1
    assert "both replicas that had a share of the optimizer's state were lost" in err
    epochs = int(str(snapshots.manifest(snapshots.numbers()[-1]).ledger["epoch"])) + 2
    resumed = Started(run.directory, "resume", str(run.directory), "--epochs", str(epochs))
    check_end(resumed, epochs)


SNAPSHOTS = ("--snapshot-every-s", "0.5")


@pytest.mark.parametrize("changes", deep.sweep([("--replicas", "3"), ("--replicas", "1"), ()], 1))
def test_an_interrupted_run_is_resumed(tmp_path: Path, changes: tuple[str, ...]) -> None:
    with training(tmp_path, 2) as run:
        run.process.send_signal(signal.SIGINT)
        assert wait_for(run.gone, 6.0, "the children to be gone") < 3.0
        status, out, err = run.finish()
        assert status == 130, err
        assert "Traceback" not in err
        assert f"squall resume {run.directory}" in out + err
    epochs = examples(run) // EXAMPLES + 1
    command = ("resume", str(run.directory), "--epochs", str(epochs), *changes)
    check_end(Started(run.directory, *command), epochs)


@deep.only
def test_when_all_replicas_are_lost_the_run_is_resumed_to_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    with training(tmp_path, 2, ENDLESS, *SNAPSHOTS) as run:
        snapshots = Snapshots(run.directory)
        wait_for(snapshots.numbers, START_S, "a snapshot")
        seen = examples(run)
        wait_for(lambda: examples(run) > seen, START_S, "progress that will be lost")
        replicas = [pid for role, pid in run.processes().items() if role.startswith("replica")]
        for pid in replicas:
            os.kill(pid, signal.SIGKILL)
        status, _, err = run.finish()
    assert status == 1
    assert "all replicas that had the newest weights were lost" in err
    assert re.search(r"from snapshot \d+ with: squall resume " + re.escape(str(run.directory)), err)
    assert "Traceback" not in err
    epochs = int(str(snapshots.manifest(snapshots.numbers()[-1]).ledger["epoch"])) + 2
    resumed = Started(run.directory, "resume", str(run.directory), "--epochs", str(epochs))
    check_end(resumed, epochs)
    with training(tmp_path, 2, epochs) as undisturbed:
        check_end(undisturbed, epochs)
    mine, others = (last_weights(directory) for directory in (run.directory, undisturbed.directory))
    assert (mine - others).norm() < 1e-6 * others.norm()


def last_weights(directory: Path) -> Tensor:
    snapshots = Snapshots(directory)
    return snapshots.weights(snapshots.numbers()[-1])


@pytest.mark.parametrize("how", deep.sweep(["it ends", "the launching process is killed", "the nursery is killed"], 1))
def test_nothing_is_left_behind(tmp_path: Path, how: str) -> None:
    directory, scratch = tmp_path / f"run-{uuid4().hex[:8]}", Path(tempfile.mkdtemp())  # where sockets' names fit
    flags = ("--strategy", "all_reduce", "--restarts", "0", "--epochs", str(2 if how == "it ends" else ENDLESS))
    environment = {**os.environ, "TMPDIR": str(scratch)}
    run = Started(directory, "train", str(FILE), "--run-dir", str(directory), *flags, env=environment, draws=True)
    try:
        run.wait_rows(ProgressRow, lambda row: row.examples > 0)
        if how == "the launching process is killed":
            run.process.kill()
        elif how == "the nursery is killed":
            run.kill("nursery")
        run.finish()
    finally:
        run.process.kill()
        wait_for(run.gone, 10, "the children to be gone")
    kept = {"code.pickle", "lock", "report.html", "run.json", "run.sqlite", "schedule", "snapshots"}
    assert how != "it ends" or {path.name for path in directory.iterdir()} == kept
    scratch.rmdir()  # it is empty


# ---------------------------------------------------------------- the user's code


def is_replica(index: int) -> bool:
    return Path("/proc/self/cmdline").read_bytes().startswith(f"squall replica {index} ".encode())


def fit(task: TaskFunction, run_dir: Path, **options: Any) -> Run:
    """Two replicas, of which each has a batch of 8 in every round."""
    options = {"strategy": squall.AllReduce(replicas=2), "settings": LOCAL} | options
    return squall.fit(task, run_dir=run_dir, **options)


@pytest.mark.usefixtures("without_report")
def test_a_newcomer_takes_the_same_steps_as_the_others(run_dir: Path, tmp_path: Path) -> None:
    """Its optimizer has the state of theirs, else its next weights were others."""
    killed, seen = tmp_path / "killed", tmp_path / "seen"

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        if is_replica(1) and (batch[2] == 40).any() and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        for index in range(2):
            if is_replica(index):
                with seen.with_name(f"{index} {killed.exists()}").open("a") as file:
                    file.write(f"{[p.flatten().tolist() for p in model.parameters()]}\n")
        return mean_square(model, batch)

    task = regression(Matrices, train=TensorDataset(*numbers(96).tensors, torch.arange(96)), batch_size=8, loss=loss)
    run = fit(task, run_dir, strategy=squall.AllReduce(replicas=2, optimizer=Lars), epochs=20)
    assert run.summary().examples == 20 * 96
    old, new = (set(seen.with_name(f"{index} True").read_text().splitlines()) for index in range(2))
    assert len(new) > 1
    assert new <= old


def break_at_40(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    if model.training and (is_replica(0) or is_replica(1)) and (batch[2] == 40).any():
        raise KeyError("the loss broke in a replica")
    return mean_square(model, batch)


NUMBERED = TensorDataset(*numbers(96).tensors, torch.arange(96))


@pytest.mark.usefixtures("without_report")
def test_an_exception_in_one_replica_ends_the_run_while_the_others_wait_for_it(run_dir: Path) -> None:
    with pytest.raises(squall.TaskError, match="the loss broke in a replica") as caught:
        fit(regression(train=NUMBERED, batch_size=8, loss=break_at_40), run_dir, epochs=3)
    assert "in break_at_40" in str(caught.value)
    assert Snapshots(run_dir).numbers()


def poisoned(times: int, counts: Path) -> Callable[[nn.Module, Sequence[Tensor]], Tensor]:
    """A loss that is NaN for the batch with example 40, the first so many times."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        value = mean_square(model, batch)
        if (batch[2] == 40).any() and (is_replica(0) or is_replica(1)):
            with counts.open("a") as file:
                file.write(".")
            if counts.stat().st_size <= times:
                return value * float("nan")
        return value

    return loss


@pytest.mark.usefixtures("without_report")
def test_a_batch_that_stays_nan_ends_the_run_with_its_name(run_dir: Path, tmp_path: Path) -> None:
    task = regression(train=NUMBERED, batch_size=8, loss=poisoned(1000, tmp_path / "counts"))
    with pytest.raises(squall.NotFinite, match=r"examples \d+ to \d+ of epoch 0 \(lease \d+\)") as caught:
        fit(task, run_dir, epochs=3)
    named = re.search(r"examples (\d+) to (\d+)", str(caught.value))
    assert named is not None
    place = epoch_order(0, 0, 96, shuffle=True).tolist().index(40)
    assert int(named[1]) <= place <= int(named[2])
    assert last_weights(run_dir).isfinite().all()


@pytest.mark.usefixtures("without_report")
def test_a_nan_that_goes_away_is_survived(run_dir: Path, tmp_path: Path) -> None:
    task = regression(train=NUMBERED, batch_size=8, loss=poisoned(1, tmp_path / "counts"))
    run = fit(task, run_dir, epochs=3)
    assert run.summary().examples == 3 * 96
    clean = fit(regression(train=NUMBERED, batch_size=8), tmp_path / "clean", epochs=3)
    assert difference(run.model, clean.model) == 0.0


@pytest.mark.usefixtures("without_report")
def test_evaluations_patience_and_the_best_weights(run_dir: Path) -> None:
    """The last replica is slowed, so that evaluations find others at its side who wait."""
    task = regression(train=NUMBERED, validate=numbers(40), batch_size=8)
    wild = squall.AllReduce(replicas=2, optimizer=partial(torch.optim.SGD, lr=0.3, momentum=0.9))
    settings = replace(LOCAL, slow=0.5)
    run = fit(task, run_dir, strategy=wild, settings=settings, epochs=1000, keep_best="loss", patience=4)
    losses = run.history.evaluations["loss"]
    assert run.summary().ended == "patience"
    without = [at - losses.index(min(losses[: at + 1])) for at in range(len(losses))]
    assert 4 in without[-3:]  # behind it are that of an epoch which ends as the run stops, and of the final weights
    for model, value in ((run.best, min(losses)), (run.model, losses[-1])):
        assert evaluate(task(), model, torch.device("cpu"))["loss"] == pytest.approx(value, abs=1e-6)


def test_shards_on_the_command_line_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", str(FILE), "--strategy", "all_reduce", "--shards", "2", "--run-dir", str(tmp_path / "run")]
    assert main(command) != 0
    assert "AllReduce has no --shards: leave it out" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
