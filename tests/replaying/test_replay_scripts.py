"""A script's run is replayed with its own loop: bit for bit, whatever the loop keeps from batch to batch."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from safetensors.torch import load_file

import squall
from squall.record.rows import MemberRow, ProgressRow, SkipRow
from squall.report import Reader, audit
from squall.run import Run
from squall.runtime.snapshot import Snapshots
from tests import deep
from tests.launchers.processes import Started, wait_for

SCRIPT = Path(__file__).with_name("stateful.py")
EXAMPLES = 600  # of `drawn.py`, which draws
EPOCHS = 3 if deep.wanted else 2
STRATEGIES = {
    "downpour": ("--overlap", "--push-every", "2", "--fetch-every", "3", "--threads", "2"),
    "diloco": ("--inner-steps", "5", "--form", "asynchronous"),
}


def started(where: Path, *flags: str, epochs: int = EPOCHS, script: Path = SCRIPT) -> Started:
    directory = where / f"run-{uuid4().hex[:8]}"
    command = ("run", "--run-dir", str(directory), "--replicas", "3", "--shards", "2", *flags)
    return Started(directory, *command, str(script), str(epochs), str(where / "behind"))


def trained(where: Path, *flags: str, script: Path = SCRIPT) -> Path:
    run = started(where, *flags, script=script)
    status, _, err = run.finish()
    assert status == 0, err
    return run.directory


def interrupt(run: Started, *when: Callable[[], object]) -> None:
    """End it with a snapshot, when one condition after the other has held."""
    try:
        for condition in when:
            wait_for(condition, 60, "the run to be where it is wanted")
    finally:
        run.process.send_signal(signal.SIGINT)
        status, _, err = run.finish()
    assert status == 130, err


def at_work(run: Started, replicas: int) -> bool:
    return {row.replica for row in run.rows(ProgressRow)} >= set(range(replicas))  # type: ignore[attr-defined]


def replayed(directory: Path, *flags: str) -> tuple[int, str, str]:
    replay = Started(directory, "replay", str(directory), *flags)
    found = replay.finish()
    assert replay.gone()
    return found


@pytest.fixture(scope="module")
def lock_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `script.py` beside it."""
    script = tmp_path_factory.mktemp("script") / "script.py"
    shutil.copy(SCRIPT, script)
    shutil.copy(SCRIPT.with_name("drawn.py"), script.parent)
    return trained(script.parent, "--strategy", "synchronous", script=script)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which a replica was killed, and that was interrupted twice."""
    run = started(tmp_path_factory.mktemp("resumed"), epochs=100_000)
    joined = lambda: any(row.node == "replica-1.1" and row.change == "joined" for row in run.rows(MemberRow))  # type: ignore[attr-defined]  # noqa: E731
    interrupt(run, partial(at_work, run, 3), lambda: run.kill("replica 1"), joined)
    before = len(run.rows(ProgressRow))
    again = Started(run.directory, "resume", str(run.directory), "--replicas", "2", "--shards", "1")
    interrupt(again, lambda: len(again.rows(ProgressRow)) > before + 4)
    return run.directory


@pytest.mark.parametrize("strategy", deep.sweep(list(STRATEGIES), 1))
def test_every_replica_has_a_loop_of_its_own(strategy: str, tmp_path: Path) -> None:
    directory = trained(tmp_path, "--strategy", strategy, *STRATEGIES[strategy])
    done = (tmp_path / "behind").read_text()
    assert sorted(done.splitlines()) == ["replica 0", "replica 1", "replica 2"]
    output = tmp_path / "weights"
    status, out, err = replayed(directory, "--check", "--output", str(output))
    assert status == 0, out + err
    assert "the same, bit for bit" in out
    assert (tmp_path / "behind").read_text() == done, "nothing behind the loop is done again"
    with closing(Reader(directory / "run.sqlite")) as reader:
        found, skips = audit(reader), reader.rows(SkipRow)
    assert found.complete
    assert sum(len(span) for epoch in found.epochs for span in epoch.skipped) == 20 * len(skips) > 0, str(found)
    assert Run(directory).summary().examples == EPOCHS * EXAMPLES - 20 * len(skips)
    snapshots = Snapshots(directory)
    layout = snapshots.manifest(snapshots.numbers()[-1]).layout
    final = snapshots.restore(snapshots.numbers()[-1], layout).tensors["weights"]
    found = load_file(output)
    for span in layout.parameters:
        mine = found[span.name].flatten()
        assert torch.equal(mine, final[span.start : span.start + mine.numel()])


@deep.only
def test_a_generator_and_its_critic_are_replayed_step_by_step(tmp_path: Path) -> None:
    script = SCRIPT.with_name("contest.py")
    directory = trained(tmp_path, "--strategy", "downpour", script=script)
    with closing(Reader(directory / "run.sqlite")) as reader:
        found = audit(reader)
    assert all(epoch.exact for epoch in found.epochs), f"a batch counts once, however often it is stepped: {found}"
    status, out, err = replayed(directory, "--check")
    assert status == 0, out + err
    assert "the same, bit for bit" in out
    updates = Run(directory).summary().updates
    assert updates is not None
    assert updates > EPOCHS * 30 + EPOCHS * 30 // 2, "steps of the generator are updates as well"


@deep.only
def test_a_replica_that_was_killed_and_a_run_that_was_resumed(resumed: Path) -> None:
    for name in ("0/replica-1.1", "1/replica-1.0"):
        assert (resumed / "schedule" / name).exists()
    snapshots = Snapshots(resumed)
    behind = snapshots.manifest(snapshots.numbers()[-1]).examples
    with closing(Reader(resumed / "run.sqlite")) as reader:
        assert reader.skipped(EXAMPLES)
        told = sum(row.examples for row in reader.progress())
    assert told <= behind[0] <= told + 3 * 20, "what was left out is in no count; what a kill has halved is there twice"
    status, out, err = replayed(resumed, "--check")
    assert status == 0, out + err
    assert "the same, bit for bit" in out


def test_a_replay_that_is_interrupted_leaves_no_process(resumed: Path) -> None:
    replay = Started(resumed, "replay", str(resumed))
    try:
        wait_for(replay.processes, 60, "its replicas")
    finally:
        os.kill(replay.process.pid, signal.SIGINT)
        status, out, err = replay.finish()
    assert status == 130, out + err
    assert replay.gone()


@deep.only
def test_the_batch_that_made_a_nan_is_watched_in_its_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAN_AT", "4")
    directory = trained(tmp_path, "--strategy", "synchronous")
    status, out, err = replayed(directory, "--check")
    assert status == 0, out + err
    status, out, err = replayed(directory, "--around-nan", "--json")
    assert status == 0, err
    found = json.loads(out)["nan"]
    assert found["replica"] == "replica-1.0"
    assert found["module"] == "", "all that modules gave was finite: the script has made it"
    assert found["parameters"]["3.weight"] == 1000


@pytest.mark.parametrize(
    ("change", "value", "message"),
    [
        ("BREAK_AT", 3, "what it did in replica-1.0: before it had stepped examples"),
        ("CANCEL_AT", 3, "CancelledError: not an Exception"),
        ("RAISE", 1, "KeyError: 'before the loop'"),
        ("RAISE", 0, "KeyError: 'before the loop'"),
        ("NAN_AT", 3, "the gradient was finite in the run, and is not finite here"),
    ],
)
def test_a_script_that_does_something_else_now_is_told_of(
    change: str, value: int, message: str, lock_step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(change, str(value))
    status, out, err = replayed(lock_step)
    assert (status, out.count("replayed in") <= 1) == (1, True), out + err
    assert message in out + err


def test_the_script_is_replayed_as_it_was_though_it_was_changed_or_is_gone(
    lock_step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"is the run of a script: replay it by `squall replay"):
        squall.replay(lock_step)
    script = lock_step.parent / "script.py"
    try:
        script.write_text("raise KeyError('of another script')")
        status, out, err = replayed(lock_step, "--check")
        assert (status, "elsewhere" in out) == (0, False), out + err
        script.unlink()
        status, out, err = replayed(lock_step, "--check")
        assert (status, "the same, bit for bit" in out) == (0, True), out + err
    finally:
        shutil.copy(SCRIPT, script)
    monkeypatch.setenv("NO_JOIN", "1")
    status, out, err = replayed(lock_step)
    assert (status, "does not come to squall.join any more: it ended" in err) == (1, True), out + err


def test_a_loop_that_stops_by_its_own_count_is_replayed_and_its_script_can_know(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(COUNTS)
    run = Started(tmp_path / "counted-run", "run", "--run-dir", str(tmp_path / "counted-run"), str(script))
    status, _, err = run.finish()
    assert status == 0, err
    status, out, err = replayed(run.directory, "--check")
    assert status == 0, out + err
    said = (tmp_path / "behind").read_text().split()
    assert said.count("False") == 2, "in the run"
    assert said.count("True") in (1, 2), "in the replay, where a loop whose batches are used up does not end"


COUNTS = """
import itertools, pathlib, sys, torch, squall
model = torch.nn.Linear(6, 1)
session = squall.join(model)
held = [session.batches(torch.utils.data.TensorDataset(torch.randn(640, 6)), batch_size=16, epochs=100)]
held.append(held)  # a cycle, as frameworks have them
for batch in itertools.islice(held[0].epoch, 20):
    loss = model(batch[0]).square().mean()
    loss.backward()
    session.step(loss)
with pathlib.Path(__file__).with_name("behind").open("a") as file:
    print(session.replayed, file=file)
"""
