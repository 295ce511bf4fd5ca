"""All-reduce of replicas of two parts, on several machines: in one machine each, or with parts on two of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from squall.record.rows import MemberRow, ProgressRow
from tests import deep
from tests.launchers.processes import START_S, Started, send, wait_for
from tests.launchers.split import EXAMPLES
from tests.launchers.test_all_reduce import last_weights
from tests.launchers.test_all_reduce_machines import ENDLESS, check, examples, goes_on, resume_on_two
from tests.launchers.test_machines import Cluster, cluster
from tests.launchers.test_spread_parts import FLAGS, SPLIT, runs_there

SIZE = (*FLAGS, "--strategy", "all_reduce", "--replicas", "2")


@contextmanager
def training(directory: Path, *flags: str, machines: int = 2) -> Iterator[Cluster]:
    """Both replicas have trained."""
    with cluster(directory, machines, *SIZE, *flags, file=SPLIT) as found:
        for replica in range(2):
            found.run.wait_rows(ProgressRow, lambda row, replica=replica: row.replica == replica)  # type: ignore[misc]
        yield found


SPREAD = ["branches", "slices", "interleaved", "zero-bubble"]


@pytest.mark.parametrize("split", deep.sweep([*SPREAD, "1f1b"], 1))
def test_the_weights_are_those_of_replicas_on_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    monkeypatch.setenv("SPLIT", split)
    size, apart = (*SIZE, "--steps", "24"), ("--spread-parts",) if split in SPREAD else ()
    with cluster(tmp_path, 2, *size, *apart, file=SPLIT) as found:
        status, _, err = found.run.finish()
        assert status == 0, err
    assert runs_there(found) == ("part 1 of replicas 0-1" if apart else "replica 1")
    check(found.directory)
    near = Started(tmp_path / "near", "train", str(SPLIT), "--run-dir", str(tmp_path / "near"), *size)
    status, _, err = near.finish()
    assert status == 0, err
    mine, others = last_weights(found.directory), last_weights(near.directory)
    assert (mine - others).norm() < 1e-5 * others.norm()


@pytest.mark.parametrize("victim", deep.sweep(["replica 1 part 1", "replica 1", "replica 0"], 1))
@deep.only
def test_a_part_that_is_killed_is_its_replicas_death_and_no_example_is_lost(tmp_path: Path, victim: str) -> None:
    with training(tmp_path, "--epochs", ENDLESS, "--spread-parts") as found:
        found.run.kill(victim)
        successor = victim.removesuffix(" part 1").replace(" ", "-") + ".1"
        found.run.wait_rows(MemberRow, lambda row: (row.node, row.change) == (successor, "joined"))  # type: ignore[attr-defined]
        before = examples(found.run)
        wait_for(lambda: examples(found.run) > before + EXAMPLES, START_S, "the end of the epoch in which it died")
        found.run.process.send_signal(signal.SIGINT)
        status, _, err = found.run.finish()
        assert status == 130, err
    check(found.directory)


@pytest.mark.parametrize(("how", "machines"), deep.sweep([("cut off", 3), ("cut off", 2), ("gone", 3), ("gone", 2)], 1))
@deep.only
def test_the_other_replica_goes_on_without_a_machine_that_is_lost(tmp_path: Path, how: str, machines: int) -> None:
    """Of three machines each replica has parts on two; of two each has one. Nothing breaks where one is cut off."""
    apart = ("--spread-parts",) if machines == 3 else ()
    with training(tmp_path, "--epochs", ENDLESS, *apart, machines=machines) as found:
        lost = found.machines[0]
        lost.signal(signal.SIGSTOP if how == "cut off" else signal.SIGKILL)
        found.event("lost", "nothing was heard of it")
        goes_on(found.run)
        if how == "cut off":
            send(lost.pids(), signal.SIGCONT)
        assert lost.finish()[0] == 1
        found.run.process.send_signal(signal.SIGINT)
        status, _, err = found.run.finish()
        assert status == 130, err
    check(found.directory, replays=False)


@deep.only
def test_an_interrupted_run_is_resumed_on_two_machines_and_on_one(tmp_path: Path) -> None:
    with training(tmp_path, "--epochs", ENDLESS, "--spread-parts") as found:
        found.run.process.send_signal(signal.SIGINT)
        status, _, err = found.run.finish()
        assert status == 130, err
        assert "Traceback" not in err
    epochs = examples(found.run) // EXAMPLES + 1
    resume_on_two(found, epochs, EXAMPLES)
    alone = ("--machines", "1", "--parts", "1", "--epochs", str(epochs + 1))
    status, _, err = Started(found.directory, "resume", str(found.directory), *alone).finish()
    assert status == 0, err
    check(found.directory)
