"""All-reduce over several machines, each a nursery on loopback: replicas and machines are lost, leave and come."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from squall import replay
from squall.record.rows import MemberRow, ProgressRow
from squall.report import Reader, audit, summarize
from squall.runtime.snapshot import Snapshots
from tests import deep
from tests.launchers.blobs import EXAMPLES
from tests.launchers.processes import START_S, Started, send, wait_for
from tests.launchers.test_all_reduce import last_weights
from tests.launchers.test_machines import CORES, Cluster, cluster, titles

FLAGS = ("--strategy", "all_reduce", "--threads", "1")
ENDLESS = "100000"


@contextmanager
def training(directory: Path, replicas: int, epochs: str, *flags: str) -> Iterator[Cluster]:
    """On two machines; all have trained."""
    with cluster(directory, 2, *FLAGS, "--replicas", str(replicas), "--epochs", epochs, *flags) as found:
        for replica in range(replicas):
            found.run.wait_rows(ProgressRow, lambda row, replica=replica: row.replica == replica)  # type: ignore[misc]
        yield found


def examples(run: Started) -> int:
    return sum(row.examples for row in run.rows(ProgressRow))  # type: ignore[attr-defined]


def goes_on(run: Started) -> float:
    """Seconds until more is trained."""
    before = examples(run)
    return wait_for(lambda: examples(run) > before, START_S, "progress")


def newcomer_trains(run: Started) -> bool:
    joined = {
        int(row.node.removeprefix("replica-").partition(".")[0]): row.time_s  # type: ignore[attr-defined]
        for row in run.rows(MemberRow)
        if row.change == "joined" and row.node.startswith("replica") and not row.node.endswith(".0")  # type: ignore[attr-defined]
    }
    return any(row.time_s > joined.get(row.replica, row.time_s) for row in run.rows(ProgressRow))  # type: ignore[attr-defined]


def check(directory: Path, *, replays: bool = True) -> None:
    """Each example was trained once in each epoch that is over. `replays`: all machines have given their schedules."""
    if replays:
        replayed = replay(directory, check=True)
        assert replayed.as_asked, str(replayed)
        assert replayed.fingerprints > 0
    with closing(Reader(directory / "run.sqlite")) as reader:
        found = audit(reader)
        assert found.complete
        assert not [span for epoch in found.epochs for span in epoch.spans if span.times > 1]


def resume_on_two(found: Cluster, epochs: int, each: int = EXAMPLES) -> None:
    """An interrupted run, up to so many epochs of so many examples."""
    listen = ("--machines", "2", "--listen", "127.0.0.1:0", "--epochs", str(epochs))
    run = Started(found.directory, "resume", str(found.directory), *listen)
    while "squall join" not in (line := run.process.stderr.readline()):
        assert line, "the run has ended"
    found.address = line.split()[2]
    machine = found.join()
    status, _, err = run.finish()
    assert status == 0, err
    assert machine.finish()[0] == 0
    assert examples(run) == epochs * each


@deep.only
def test_the_weights_are_those_of_a_run_on_one_machine(tmp_path: Path) -> None:
    size = ("--replicas", "3", "--epochs", "3", "--optimizer", "SGD", "--lr", "0.05")
    with cluster(tmp_path, 2, *FLAGS, *size) as found:
        status, _, err = found.run.finish()
        assert status == 0, err
    alone = Started.train(tmp_path / "alone", *FLAGS, *size)
    status, _, err = alone.finish()
    assert status == 0, err
    mine, others = last_weights(found.directory), last_weights(alone.directory)
    assert (mine - others).norm() < 1e-5 * others.norm()


@deep.only
@deep.only
@pytest.mark.parametrize("victim", ["replica 1", "replica 0"])
def test_a_killed_replica_is_replaced_and_no_example_is_lost(tmp_path: Path, victim: str) -> None:
    with training(tmp_path, 4, "8") as found:
        found.run.kill(victim)
        status, _, err = found.run.finish(2 * START_S)
        assert status == 0, err
        changes = {(row.node, row.change) for row in found.run.rows(MemberRow)}  # type: ignore[attr-defined]
        assert (f"{victim.replace(' ', '-')}.1", "joined") in changes
        assert examples(found.run) == 8 * EXAMPLES
    check(found.directory)
    with closing(Reader(found.directory / "run.sqlite")) as reader:
        traffic = summarize(reader).machines
        assert traffic[0] == traffic[1][::-1], "what one has sent the other has received"
        assert min(traffic[0]) > 0


@pytest.mark.parametrize("how", deep.sweep(["cut off", "gone"], 1))
def test_the_others_go_on_without_a_machine_that_is_lost_and_one_that_comes_has_room(tmp_path: Path, how: str) -> None:
    """Where it is cut off no connection breaks: who waits for its replicas hears from the coordinator."""
    with training(tmp_path, 2 * CORES, ENDLESS) as found:
        lost = found.machines[0]
        lost.signal(signal.SIGSTOP if how == "cut off" else signal.SIGKILL)
        found.event("lost", "machine 1 was lost: nothing was heard of it")
        goes_on(found.run)
        found.event("warning", "waits: no machine has room for it")
        found.machines[0] = found.join()
        found.event("replaced", "on machine 2, which had room for")
        wait_for(lambda: newcomer_trains(found.run), START_S, "what a replacement has trained")
        if how == "cut off":
            send(lost.pids(), signal.SIGCONT)
        assert lost.finish()[0] == 1
        found.run.process.send_signal(signal.SIGINT)
        assert found.run.finish()[0] == 130
    check(found.directory, replays=False)


@deep.only
def test_a_machine_leaves_in_order(tmp_path: Path) -> None:
    with training(tmp_path, 2, ENDLESS) as found:
        (leaver,) = found.machines
        assert any("replica" in title for title in titles(leaver))
        leaver.process.send_signal(signal.SIGINT)
        assert leaver.finish()[0] == 0
        goes_on(found.run)
        found.run.process.send_signal(signal.SIGINT)
        assert found.run.finish()[0] == 130
    check(found.directory)


@deep.only
def test_an_interrupted_run_is_resumed_on_two_machines(tmp_path: Path) -> None:
    with training(tmp_path, 2, ENDLESS) as found:
        found.run.process.send_signal(signal.SIGINT)
        status, out, err = found.run.finish()
        assert status == 130, err
        assert f"squall resume {found.directory}" in out + err
        epochs = examples(found.run) // EXAMPLES + 2
    resume_on_two(found, epochs)
    check(found.directory)


# ---------------------------------------------------------------- the optimizer's state divided

SHARES = ("--shard-optimizer", "--optimizer", "Adam", "--lr", "0.01")


@deep.only
def test_shares_of_a_snapshot_come_from_both_machines_and_the_run_goes_on_from_them(tmp_path: Path) -> None:
    with training(tmp_path, 4, ENDLESS, *SHARES) as found:
        found.run.process.send_signal(signal.SIGINT)
        status, _, err = found.run.finish()
        assert status == 130, err
    check(found.directory, replays=False)
    snapshots = Snapshots(found.directory)
    number = snapshots.newest()
    assert number is not None
    assert len(snapshots.manifest(number).checksums) == 4
    epochs = examples(found.run) // EXAMPLES + 1
    run = Started(found.directory, "resume", str(found.directory), "--machines", "1", "--epochs", str(epochs))
    status, _, err = run.finish()
    assert status == 0, err
    assert examples(run) == epochs * EXAMPLES


@deep.only
def test_half_of_the_members_go_with_their_machine_and_no_share_with_them(tmp_path: Path) -> None:
    """Neighbours are on different machines."""
    with training(tmp_path, 4, ENDLESS, *SHARES) as found:
        found.machines[0].signal(signal.SIGKILL)
        found.event("lost", "machine 1 was lost: nothing was heard of it")
        goes_on(found.run)
        found.run.process.send_signal(signal.SIGINT)
        assert found.run.finish()[0] == 130
    check(found.directory, replays=False)


@deep.only
def test_a_machine_with_shares_leaves_in_order(tmp_path: Path) -> None:
    with training(tmp_path, 4, ENDLESS, *SHARES) as found:
        (leaver,) = found.machines
        leaver.process.send_signal(signal.SIGINT)
        assert leaver.finish()[0] == 0
        goes_on(found.run)
        found.run.process.send_signal(signal.SIGINT)
        assert found.run.finish()[0] == 130
    check(found.directory, replays=False)
