"""Replicas whose parts are on two machines, in whole runs: what they train, and what a lost part leads to."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from squall import replay
from squall.parts.shares import shares
from squall.protocol.effects import Payload
from squall.protocol.nodes import replica_node
from squall.record.rows import MemberRow, ProgressRow
from squall.report import Reader, audit, summarize
from squall.runtime.ranges import Ranges
from squall.vector import Layout
from tests import deep
from tests.launchers import blobs
from tests.launchers.processes import START_S, Started, wait_for
from tests.launchers.split import EXAMPLES, SPLITS
from tests.launchers.split import task as split_task
from tests.launchers.test_all_reduce import examples, last_weights
from tests.launchers.test_machines import Cluster, cluster

PIPED, SPLIT = (Path(__file__).with_name(name) for name in ("piped.py", "split.py"))
FLAGS = ("--parts", "2", "--threads", "1", "--optimizer", "SGD", "--lr", "0.05")


@contextmanager
def training(directory: Path, *flags: str, shards: int = 1, file: Path = PIPED) -> Iterator[Cluster]:
    """Two replicas, each with a part on each of two machines; both have trained. A shard alone is on the head's."""
    size = ("--replicas", "2", "--shards", str(shards), "--spread-parts")
    with cluster(directory, 2, *FLAGS, *size, *flags, file=file) as found:
        for replica in range(2):
            found.run.wait_rows(ProgressRow, lambda row, replica=replica: row.replica == replica)  # type: ignore[misc]
        yield found


def check_traffic(split: str, sent: Sequence[int], pushes: int) -> None:
    """Each machine has sent what its part has of the other one's shard, and its shard of the other one's part."""
    model, how = SPLITS[split]
    task = dataclasses.replace(split_task(), model=model(), split=how)
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    ranges = Ranges(layout, 2, shares(task, layout, (), 2))

    def size(kind: Any, part: int) -> int:
        """Between a part and the shard on the other machine, in bytes."""
        return 4 * ranges(Payload(kind, replica_node(0, 0), 0, 0, 1 - part, part=part)).count

    weights = [sent[machine] - pushes * size("gradient", machine) for machine in (0, 1)]
    fetches = weights[0] // size("weights", 1)
    assert weights == [fetches * size("weights", 1), fetches * size("weights", 0)]
    assert fetches >= pushes


def check(directory: Path) -> None:
    """All examples are trained, and the record has what each part did, and replays."""
    with closing(Reader(directory / "run.sqlite")) as reader:
        assert audit(reader).complete
        parts = {(each.replica, each.part) for each in summarize(reader).parts}
        assert parts == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert replay(directory, check=True).as_asked


def runs_there(found: Cluster) -> str:
    """What was placed on the machine that has joined."""
    with closing(Reader(found.directory / "run.sqlite")) as reader:
        *_, runs = summarize(reader).inventory.machines[1]
    return runs


@deep.only
@pytest.mark.parametrize("split", deep.sweep(["slices", "interleaved", "zero-bubble", "branches", "1f1b"], 1))
@deep.only
def test_the_weights_are_those_of_parts_on_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    monkeypatch.setenv("SPLIT", split)
    size = (*FLAGS, "--replicas", "2", "--shards", "2", "--strategy", "synchronous", "--steps", "24")
    with cluster(tmp_path, 2, *size, "--spread-parts", file=SPLIT) as found:
        status, _, err = found.run.finish()
        assert status == 0, err
    assert runs_there(found).endswith("part 1 of replicas 0-1")
    check(found.directory)
    if split in ("slices", "branches"):  # where a pipeline is cut is measured
        with closing(Reader(found.directory / "run.sqlite")) as reader:
            (sent, received), (back, forth) = summarize(reader).machines.values()
        assert (sent, received) == (forth, back)
        check_traffic(split, (sent, back), pushes=24)
    near = Started(tmp_path / "near", "train", str(SPLIT), "--run-dir", str(tmp_path / "near"), *size)
    status, _, err = near.finish()
    assert status == 0, err
    mine, others = last_weights(found.directory), last_weights(near.directory)
    assert (mine - others).norm() < 1e-6 * others.norm()


@pytest.mark.parametrize("victim", deep.sweep(["replica 1 part 1", "replica 1"], 1))
def test_a_part_that_is_killed_is_its_replicas_death(tmp_path: Path, victim: str) -> None:
    with training(tmp_path, "--epochs", "100000", file=SPLIT) as found:
        rest = found.run.processes()[{"replica 1": "replica 1 part 1"}.get(victim, "replica 1")]
        found.run.kill(victim)
        found.run.wait_rows(MemberRow, lambda row: (row.node, row.change) == ("replica-1.1", "joined"))  # type: ignore[attr-defined]
        assert not Path(f"/proc/{rest}").exists(), "the rest of it has ended before another begins"
        before = examples(found.run)
        wait_for(lambda: examples(found.run) > before + EXAMPLES, START_S, "the end of the epoch in which it died")
        found.run.process.send_signal(signal.SIGINT)
        status, _, err = found.run.finish()
        assert status == 130, err
    check(found.directory)


@deep.only
def test_a_machine_with_parts_is_lost_and_the_other_one_goes_on(tmp_path: Path) -> None:
    """With as many whole replicas as it has room for."""
    with training(tmp_path, "--epochs", "100000") as found:
        found.machines[0].signal(signal.SIGKILL)
        found.event("lost", "nothing was heard of it")
        found.run.wait_rows(MemberRow, lambda row: row.change == "joined" and row.node.endswith(".1"))  # type: ignore[attr-defined]
        assert found.machines[0].finish()[0] == 1
        found.run.process.send_signal(signal.SIGINT)
        assert found.run.finish()[0] == 130


@deep.only
def test_a_machine_with_parts_leaves_in_order_and_another_takes_its_place(tmp_path: Path) -> None:
    with training(tmp_path, "--epochs", "100000") as found:
        found.machines[0].process.send_signal(signal.SIGINT)
        assert found.machines[0].finish()[0] == 0
        found.event("warning", "waits: machines have no room for all its parts")
        found.machines[0] = found.join()
        found.event("replaced", "on machine 2, which had room for 2")
        for replica in range(2):
            joined = f"replica-{replica}.1", "joined"
            found.run.wait_rows(MemberRow, lambda row, joined=joined: (row.node, row.change) == joined)  # type: ignore[misc]
        found.run.process.send_signal(signal.SIGINT)
        assert found.run.finish()[0] == 130
    check(found.directory)


@deep.only
def test_a_run_with_spread_parts_is_resumed_on_one_machine_without(tmp_path: Path) -> None:
    with training(tmp_path, "--epochs", "100000") as found:
        found.run.process.send_signal(signal.SIGINT)
        status, _, err = found.run.finish()
        assert status == 130, err
        assert "Traceback" not in err
    epochs = examples(found.run) // blobs.EXAMPLES + 1
    command = ("resume", str(found.directory), "--epochs", str(epochs), "--parts", "1", "--machines", "1")
    status, _, err = Started(found.directory, *command).finish()
    assert status == 0, err
    assert json.loads((found.directory / "run.json").read_text())["plan"]["settings"]["parts"] == 1


def test_what_a_part_elsewhere_raises_is_told_as_the_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = ("--replicas", "1", "--shards", "1", "--spread-parts")
    monkeypatch.setenv("RAISES", "replica 0 part 1")
    with cluster(tmp_path, 2, *FLAGS, *size, file=PIPED) as found:
        status, _, err = found.run.finish()
        assert status == 1, err
        assert "the user's own mistake" in err
        assert "in part 1 of replica 0, on machine 1" in err
