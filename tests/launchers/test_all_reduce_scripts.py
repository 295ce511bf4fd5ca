"""`squall run --strategy all_reduce`: a script's loop as a member of a group. Real processes, real signals."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch import Tensor

import squall
from squall.record.rows import EventRow, MemberRow, MetricRow, ProgressRow, SkipRow
from squall.report import Reader, audit
from squall.run import Run
from tests import deep
from tests.launchers.blobs import EXAMPLES, task
from tests.launchers.processes import START_S, Started, training_all, wait_for
from tests.launchers.test_machines import SOON_S, cluster
from tests.launchers.test_scripts import SCRIPT, alone, weights
from tests.tasks import LOCAL
from tests.warm import squall as commanded

GROUPED = str(Path(__file__).with_name("grouped.py"))
REDUCE = ("--strategy", "all_reduce")
ENDLESS = "100000"


def started(tmp_path: Path, *arguments: str, flags: tuple[str, ...] = REDUCE, script: str = GROUPED) -> Started:
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    own = ("--file", str(directory) + ".pt") if script == GROUPED else ()
    return Started(directory, "run", "--run-dir", str(directory), *flags, script, *own, *arguments)


def last_weights(run: Started) -> list[Tensor]:
    """Of each replica, in one piece."""
    paths = sorted(run.directory.parent.glob(f"{run.directory.name}.weights-*"))
    return [torch.cat([tensor.flatten().double() for tensor in torch.load(path).values()]) for path in paths]


def check_end(run: Started, replicas: int, epochs: int = 1) -> list[Tensor]:
    """It ends well; no example was trained twice, and all replicas have the same weights, which are returned."""
    status, _, err = run.finish()
    assert status == 0, err
    with closing(Reader(run.directory / "run.sqlite")) as reader:
        found, skipped = audit(reader), reader.rows(SkipRow)
    assert found.complete, str(found)
    assert not [span for epoch in found.epochs for span in epoch.spans if span.times > 1]
    left_out = sum(row.stop - row.start for row in skipped)
    assert sum(row.examples for row in run.rows(ProgressRow)) == epochs * EXAMPLES - left_out  # type: ignore[attr-defined]
    ended = last_weights(run)
    assert len(ended) == replicas
    assert all(torch.equal(ended[0], other) for other in ended)
    return ended


def same(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() < 1e-6)


@pytest.mark.parametrize("mode", deep.sweep(["rates", "skip", "nan"], 2))
def test_a_loop_in_a_group_makes_the_updates_of_lock_step_on_shards(tmp_path: Path, mode: str) -> None:
    runs = [started(tmp_path, "--mode", mode, flags=flags) for flags in (REDUCE, ("--strategy", "synchronous"))]
    one, other = (check_end(run, 2)[0] for run in runs)
    assert same(one, other)


def test_a_loop_in_a_group_makes_the_updates_of_fit(tmp_path: Path) -> None:
    run = started(tmp_path, flags=(*REDUCE, "--replicas", "3"))
    fitted = squall.fit(
        partial(task, batch_size=64), run_dir=tmp_path / "fit", settings=LOCAL, epochs=1,
        strategy=squall.AllReduce(replicas=3, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9)),
    )  # fmt: skip
    expected = torch.cat([tensor.flatten().double() for tensor in fitted.model.state_dict().values()])
    assert same(check_end(run, 3)[0], expected)
    logged = [row for row in run.rows(MetricRow) if row.name == "loss"]  # type: ignore[attr-defined]
    assert [row.examples for row in logged] == [min(192 * row.updates, EXAMPLES) for row in logged]  # type: ignore[attr-defined]
    replayed = commanded("replay", run.directory)
    assert replayed.returncode == 1
    assert "holds no schedule: its attempt ran with" in replayed.stderr
    assert "of a script" in replayed.stderr


def test_a_group_of_one_is_the_script_alone(tmp_path: Path) -> None:
    status, out, err = started(tmp_path, flags=(*REDUCE, "--replicas", "1"), script=SCRIPT).finish()
    assert status == 0, err
    assert weights(out) == weights(alone()), "the same seeds, the same order, the same bits"


def test_a_replica_that_dies_in_its_loop_costs_no_example_and_the_next_gets_the_weights(tmp_path: Path) -> None:
    run = started(tmp_path, "--mode", "dies", "--epochs", "4", flags=(*REDUCE, "--replicas", "3"))
    check_end(run, 3, epochs=4)
    members = {(row.node, row.change): row for row in run.rows(MemberRow)}  # type: ignore[attr-defined]
    assert "SIGKILL" in members["replica-1.0", "lost"].why  # type: ignore[attr-defined]
    joined_s = members["replica-1.1", "joined"].time_s  # type: ignore[attr-defined]
    assert any(row.replica == 1 and row.time_s > joined_s for row in run.rows(ProgressRow))  # type: ignore[attr-defined]


@deep.only
@pytest.mark.parametrize("victims", [["replica 0"], ["replica 1", "replica 2"]])
def test_replicas_that_are_killed_at_any_moment_lose_no_example(tmp_path: Path, victims: list[str]) -> None:
    run = started(tmp_path, "--epochs", "30", flags=(*REDUCE, "--replicas", "3"))
    with training_all(run, 3):
        old = run.processes()
        for victim in victims:
            os.kill(old[victim], signal.SIGKILL)
        check_end(run, 3, epochs=30)


@contextmanager
def evaluating(tmp_path: Path) -> Iterator[Started]:
    """Its leader is somewhere in its loop, and the other one waits for it in the group."""
    run = started(tmp_path, "--mode", "evaluating", "--epochs", "3")
    try:
        wait_for(Path(f"{run.directory}.pt").exists, START_S, "the leader to be there")
        yield run
    finally:
        run.process.kill()
        wait_for(run.gone, 10, "the processes to end")


@deep.only
def test_an_interrupt_is_heard_though_others_wait_for_a_loop_that_hears_nothing(tmp_path: Path) -> None:
    with evaluating(tmp_path) as run:
        run.process.send_signal(signal.SIGINT)
        assert wait_for(run.gone, 6.0, "the processes to end") < 4.0
        status, _, err = run.finish()
        assert status == 130, err
        assert f"squall: interrupted; go on from snapshot 1 with: squall resume {run.directory}" in err
        assert not last_weights(run), "nothing behind the loop is done"
        resumed = Started(run.directory, "resume", str(run.directory), "--replicas", "3")
        check_end(resumed, 3, epochs=3)


@pytest.mark.parametrize("mode", deep.sweep(["break", "held"], 1))
def test_to_break_out_of_the_loop_ends_the_training_for_all(tmp_path: Path, mode: str) -> None:
    run = started(tmp_path, "--mode", mode, "--epochs", ENDLESS, flags=(*REDUCE, "--replicas", "3"), script=SCRIPT)
    status, out, err = run.finish()
    assert status == 0, err
    assert len(weights(out)) == 3
    assert len(set(weights(out))) == 1
    summary = Run(run.directory).summary()
    assert (summary.ended, summary.updates) == ("script", 5)
    assert run.rows(MetricRow)[-1].examples == summary.examples == 5 * 3 * 64, "of the final weights"  # type: ignore[attr-defined]


def test_a_batch_that_stays_nan_ends_the_run_and_names_whose_it_is(tmp_path: Path) -> None:
    run = started(tmp_path, "--mode", "nan twice")
    status, _, err = run.finish()
    assert status == 1
    assert re.search(r"replica 1: NaN or Inf in the loss or gradient of examples \d+ to \d+ of epoch 0", err), err
    events = [row.text for row in run.rows(EventRow) if row.kind == "nonfinite"]  # type: ignore[attr-defined]
    assert ["tried again" in text for text in events] == [True, False]
    assert not last_weights(run)


def test_a_loop_that_counts_its_own_epochs_and_steps_an_optimizer_trains_every_example_once(tmp_path: Path) -> None:
    run = started(tmp_path, "--mode", "count", flags=(*REDUCE, "--replicas", "2"), script=SCRIPT)
    status, out, err = run.finish()
    assert status == 0, err
    assert len(weights(out)) == 2
    assert len(set(weights(out))) == 1
    with closing(Reader(run.directory / "run.sqlite")) as reader:
        assert audit(reader).complete


def test_a_group_of_scripts_is_on_two_machines(tmp_path: Path) -> None:
    """Where one leaves, its replicas begin again where there is room."""
    flags = (*REDUCE, "--threads", "1", "--replicas", "3")
    with cluster(tmp_path, 2, *flags, script=(SCRIPT, "--epochs", "4")) as found:
        status, out, err = found.run.finish()
        assert status == 0, err
        other, there = found.machines[0].finish(SOON_S)
        assert other == 0, there
        assert len(weights(out) + weights(there)) == 3
        assert len(set(weights(out) + weights(there))) == 1
        with closing(Reader(found.directory / "run.sqlite")) as reader:
            assert audit(reader).complete


@deep.only
def test_a_machine_that_is_lost_in_the_middle_of_a_step_leaves_the_group_to_others(tmp_path: Path) -> None:
    """Nothing tells those who wait for its loops but the coordinator's next view."""
    flags = (*REDUCE, "--threads", "1", "--replicas", "3")
    with cluster(tmp_path, 2, *flags, script=(SCRIPT, "--epochs", ENDLESS)) as found:
        for replica in range(3):
            found.run.wait_rows(ProgressRow, lambda row, replica=replica: row.replica == replica)  # type: ignore[misc]
        found.machines[0].signal(signal.SIGSTOP)
        found.event("lost", "machine 1 was lost: nothing was heard of it")
        rows = len(found.run.rows(ProgressRow))
        wait_for(lambda: len(found.run.rows(ProgressRow)) > rows + 4, START_S, "the others to go on")
        found.run.process.send_signal(signal.SIGINT)
        status, _, err = found.run.finish()
        assert status == 130, err
        assert "go on from snapshot" in err
        found.machines[0].signal(signal.SIGKILL)
        found.machines[0].finish()
    with closing(Reader(found.directory / "run.sqlite")) as reader:
        assert not [span for epoch in audit(reader).epochs for span in epoch.spans if span.times > 1]
