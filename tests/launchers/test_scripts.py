"""`squall run`: a user's own script as one replica of several, and alone. Real processes."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

import squall
from squall.record.rows import EventRow, MetricRow, ProgressRow, StateRow
from squall.report import Reader, audit
from squall.run import Run
from tests import deep
from tests.launchers.blobs import EXAMPLES
from tests.launchers.processes import START_S, Started, wait_for
from tests.warm import python

SCRIPT = str(Path(__file__).with_name("script.py"))


def started(tmp_path: Path, *arguments: str, flags: tuple[str, ...] = ()) -> Started:
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    return Started(directory, "run", "--run-dir", str(directory), *flags, SCRIPT, *arguments)


def alone(*arguments: str) -> str:
    done = python(SCRIPT, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def weights(output: str) -> list[str]:
    return re.findall(r"weights (\w{64})", output)  # replicas may print into each other's lines


def test_replicas_train_every_example_once_and_end_with_the_same_weights(tmp_path: Path) -> None:
    run = started(tmp_path, "--epochs", "4", flags=("--replicas", "3", "--shards", "2"))
    status, out, err = run.finish()
    assert status == 0, err
    assert out.count("before") == 1
    assert sorted(re.findall(r"replica \d of 3, leader [TF]", out)) == [
        f"replica {rank} of 3, leader {str(rank == 0)[0]}" for rank in range(3)
    ]
    assert len(weights(out)) == 3
    assert len(set(weights(out))) == 1
    reader = Reader(run.directory / "run.sqlite")
    found, metrics = audit(reader), reader.rows(MetricRow)
    reader.close()
    assert found.complete, str(found)
    assert len(found.epochs) == 4
    assert {metric.name for metric in metrics} == {"accuracy"}
    assert [metric.examples for metric in metrics] == [64 * metric.updates for metric in metrics]
    assert metrics[-1].examples == 4 * EXAMPLES, "the result behind the loop is of the final weights"
    assert run.gone()
    assert (run.directory / "schedule" / "0" / "replica-2.0").exists()


@pytest.mark.parametrize("mode", deep.sweep(["", "optimizer", "count"], 1))
@deep.only
def test_one_replica_is_the_script_alone(tmp_path: Path, mode: str) -> None:
    flags = ("--replicas", "1", "--shards", "2")
    status, out, err = started(tmp_path, "--mode", mode, flags=flags).finish()
    assert status == 0, err
    assert weights(out) == weights(alone()), "the same seeds, the same order, the same bits"


def test_a_method_that_is_no_loop_is_refused(tmp_path: Path) -> None:
    run = started(tmp_path, flags=("--strategy", "sandblaster"))
    status, _, err = run.finish()
    assert status == 1
    assert "computes a batch many times over, which no loop does: use fit" in err
    assert not run.directory.exists()


def test_flags_choose_the_strategy_and_the_optimizer_and_how_long_nothing_may_get_better(tmp_path: Path) -> None:
    flags = ("--strategy", "averaging", "--every", "4", "--optimizer", "adamw", "--lr", "0.01")
    run = started(tmp_path, "--epochs", "1000", flags=(*flags, "--until", "accuracy=2", "--patience", "3"))
    status, out, err = run.finish()
    assert status == 0, err
    state = {row.key: row.value for row in run.rows(StateRow)}  # type: ignore[attr-defined]
    assert (state["strategy"], state["status"], state["ended"]) == ("averaging", "finished", "patience")
    assert re.fullmatch(r"accuracy was not better than [01]\.\d{4} in 3 evaluations in a row", state["reason"])
    assert len(set(weights(out))) == 1


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("no join", "ended without calling squall.join"),
        ("raise before", "KeyError: 'before the join'"),
        ("no batches", "ended without training: iterate over session.batches"),
        ("step first", "session.step has no batch: take one from session.batches first"),
    ],
)
def test_a_script_that_fails_before_it_trains_uses_up_no_directory(tmp_path: Path, mode: str, message: str) -> None:
    run = started(tmp_path, "--mode", mode)
    status, out, err = run.finish()
    assert status == 1, out
    assert message in err
    assert "resume" not in err
    assert run.gone()
    assert not run.directory.exists()


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("no step", "a batch was not stepped: call session.step"),
        ("raise", "KeyError: 'in the loop'"),
        pytest.param("leave", "was lost 5 times in a row, last: exit status 0", marks=deep.only),
        ("twice", "session.batches was called before"),
    ],
)
def test_a_script_that_goes_wrong_ends_with_what_went_wrong(tmp_path: Path, mode: str, message: str) -> None:
    run = started(tmp_path, "--mode", mode)
    status, out, err = run.finish()
    assert status == 1, out
    assert message in err
    assert err.count("Traceback") <= 1
    assert not weights(out), "code behind the loop does not run, in any replica"
    assert Run(run.directory).summary().status == "failed"
    assert run.gone()


@pytest.mark.parametrize("mode", ["break", "held"])
def test_to_break_out_of_the_loop_ends_the_training_for_all(tmp_path: Path, mode: str) -> None:
    run = started(tmp_path, "--mode", mode, "--epochs", "1000")
    status, out, err = run.finish()
    assert status == 0, err
    assert "finished" in out
    assert len(weights(out)) == 2
    assert len(set(weights(out))) == 1
    found, trained = run.rows(MetricRow), Run(run.directory).summary().examples
    assert Run(run.directory).summary().ended == "script"
    said = [row.value for row in found if row.name == "left"]
    assert said == [5.0] or (mode == "break" and not said), "before the break, by the leader if it is the first"
    assert not any(math.isnan(row.loss) for row in run.rows(ProgressRow) if row.examples), "all have told what they did"
    reader = Reader(run.directory / "run.sqlite")
    spans = [span for epoch in audit(reader).epochs for span in epoch.spans]
    reader.close()
    assert sum(span.times * len(span) for span in spans) == trained, "also of leases that were left"
    assert found[-1].examples == trained > 0, "what is measured behind the loop is of the final weights"  # type: ignore[attr-defined]


def test_a_loop_with_its_own_count_of_epochs_trains_every_example_once(tmp_path: Path) -> None:
    run = started(tmp_path, "--mode", "count", flags=("--replicas", "2", "--push-every", "3"))
    status, out, err = run.finish()
    assert status == 0, err
    assert len(set(weights(out))) == 1
    reader = Reader(run.directory / "run.sqlite")
    found = audit(reader)
    reader.close()
    assert found.complete, str(found)


@deep.only
def test_a_replica_that_comes_when_all_is_trained_has_the_final_weights_too(tmp_path: Path) -> None:
    run = started(tmp_path, "--after", str(tmp_path / "trained"), flags=("--replicas", "2"))
    status, out, err = run.finish()
    assert status == 0, err
    assert len(weights(out)) == 2
    assert len(set(weights(out))) == 1
    assert run.gone()


@deep.only
def test_batches_that_a_script_still_takes_at_its_end_are_left_with_a_warning(tmp_path: Path) -> None:
    run = started(tmp_path, "--mode", "kept", "--epochs", "1000")
    status, _, err = run.finish()
    assert status == 0, err
    assert err.count("was not of the final weights. Call close() on what session.batches has returned") == 1
    assert run.gone()


@pytest.mark.parametrize("strategy", deep.sweep(["downpour", "averaging"], 1))
def test_a_loop_that_tells_no_loss_has_none_in_the_record(tmp_path: Path, strategy: str) -> None:
    run = started(tmp_path, "--mode", "optimizer", flags=("--strategy", strategy))
    status, _, err = run.finish()
    assert status == 0, err
    losses = [row.loss for row in run.rows(ProgressRow)]  # type: ignore[attr-defined]
    assert losses
    assert all(math.isnan(loss) for loss in losses)


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Started]:
    run = started(tmp_path, "--epochs", "100000", flags=("--replicas", "2", "--restarts", "0"))
    try:
        for replica in (0, 1):
            run.wait_rows(ProgressRow, lambda row, replica=replica: row.replica == replica)  # type: ignore[misc]
        yield run
    finally:
        run.process.kill()
        run.finish()
        wait_for(run.gone, 10, "the processes to end")


def test_a_killed_script_is_replaced(endless: Started) -> None:
    old = endless.kill("replica 1")
    wait_for(lambda: endless.processes().get("replica 1", old) != old, 5, "a replacement")
    seen = len(endless.rows(ProgressRow))
    wait_for(lambda: any(row.replica == 1 for row in endless.rows(ProgressRow)[seen:]), 20, "it to train")  # type: ignore[attr-defined]
    assert any(event.kind == "lost" for event in endless.rows(EventRow))  # type: ignore[attr-defined]


def test_an_interrupt_ends_the_loop_and_nothing_behind_it_is_done(endless: Started) -> None:
    endless.process.send_signal(signal.SIGINT)
    status, out, err = endless.finish()
    assert status == 130
    assert err == f"squall: interrupted; go on from snapshot 1 with: squall resume {endless.directory}\n"
    assert not weights(out)
    assert endless.gone()


def test_a_script_that_catches_the_interrupt_knows_of_it_and_has_the_snapshots_weights(tmp_path: Path) -> None:
    run = started(tmp_path, "--mode", "catch", "--epochs", "100000")
    run.wait_rows(ProgressRow, lambda row: row.examples > 0)
    run.process.send_signal(signal.SIGINT)
    status, out, err = run.finish()
    assert status == 130, err
    assert out.count("caught Interrupted, interrupted") == 2
    assert len(weights(out)) == 2
    assert len(set(weights(out))) == 1


@pytest.mark.parametrize("changes", deep.sweep([("--replicas", "3", "--shards", "1"), ()], 1))
@deep.only
def test_an_interrupted_script_is_resumed_to_its_last_epoch(tmp_path: Path, changes: tuple[str, ...]) -> None:
    run = started(tmp_path, "--epochs", "45", flags=("--replicas", "2", "--shards", "2"))
    run.wait_rows(ProgressRow, lambda row: row.examples > 0)
    run.process.send_signal(signal.SIGINT)
    assert run.finish()[0] == 130
    status, out, err = Started(run.directory, "resume", str(run.directory), *changes).finish()
    assert status == 0, err
    assert len(set(weights(out))) == 1
    reader = Reader(run.directory / "run.sqlite")
    found = audit(reader)
    reader.close()
    assert found.complete, str(found)
    assert len(found.epochs) == 45
    assert Run(run.directory).summary().examples == 45 * EXAMPLES


@deep.only
def test_what_a_script_decides_itself_is_not_changed_on_resume(tmp_path: Path) -> None:
    run = started(tmp_path)
    assert run.finish()[0] == 0
    for changes, message in (
        (("--epochs", "9"), "how much a script trains it says itself"),
        (("--until", "nonsense"), "until is 'nonsense'"),
    ):
        status, _, err = Started(run.directory, "resume", str(run.directory), *changes).finish()
        assert status == 1
        assert message in err
    with pytest.raises(ValueError, match="is the run of a script: go on with it by `squall resume"):
        squall.resume(run.directory)
    with pytest.raises(squall.SquallError, match="its model is made by"):
        Run(run.directory).model  # noqa: B018


def test_a_killed_shard_is_succeeded_and_the_scripts_go_on(endless: Started) -> None:
    endless.kill_shard("shard 0")
    wait_for(lambda: endless.replaced("shard 0"), 20, "a successor")
    endless.goes_on()
    endless.process.send_signal(signal.SIGINT)
    assert endless.finish()[0] == 130
    assert endless.gone()


def test_a_killed_coordinator_is_succeeded(endless: Started) -> None:
    endless.kill("coordinator")
    wait_for(lambda: endless.replaced("coordinator 0"), START_S, "a successor")
    endless.goes_on()
    endless.process.send_signal(signal.SIGINT)
    status, _, err = endless.finish()
    assert status == 130, err
    assert endless.gone()
