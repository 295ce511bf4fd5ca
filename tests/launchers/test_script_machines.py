"""A script on several machines, each a nursery on loopback with an arena of its own. Real processes."""

from __future__ import annotations

import re
import signal
from contextlib import closing
from pathlib import Path

import pytest

from squall.record.rows import MetricRow, ProgressRow
from squall.report import Reader, summarize
from squall.report.coverage import audit
from squall.run import Run
from tests import deep
from tests.launchers.blobs import EXAMPLES
from tests.launchers.processes import START_S, Started, wait_for
from tests.launchers.test_machines import REPLICAS, SOON_S, Cluster, cluster
from tests.launchers.test_script_parts import SCRIPT as PARTED
from tests.launchers.test_scripts import SCRIPT, weights
from tests.warm import squall

FLAGS = ("--threads", "1")
ENDLESS = (SCRIPT, "--epochs", "100000")


def test_a_script_trains_on_two_machines_and_all_replicas_end_with_the_same_weights(tmp_path: Path) -> None:
    flags = ("--replicas", "3", "--shards", "2", *FLAGS)
    with cluster(tmp_path, 2, *flags, script=(SCRIPT, "--epochs", "4")) as found:
        status, out, err = found.run.finish()
        assert status == 0, err
        other, there = found.machines[0].finish()
        assert other == 0, there
    assert "0: " in err
    assert "evaluator" not in err, "a script evaluates itself"
    assert out.count("before") == there.count("before") == 1
    ranks = [re.findall(r"replica (\d) of 3", text) for text in (out, there)]
    assert [sorted(each) for each in ranks] == [["0", "2"], ["1"]]
    assert len(weights(out)) == 2
    assert len(set(weights(out) + weights(there))) == 1
    assert re.search(r"machine 1 +sent", out), out
    with closing(Reader(found.directory / "run.sqlite")) as reader:
        assert audit(reader).complete
        metrics = reader.rows(MetricRow)
    assert metrics[-1].examples == 4 * EXAMPLES, "the result behind the loop is of the final weights"
    replayed = squall("replay", found.directory, "--check")
    assert replayed.returncode == 0, replayed.stderr


@pytest.mark.parametrize(
    ("how", "strategy"),
    deep.sweep([("pipeline", "synchronous"), ("examples", "averaging --every 2"), ("whole", "downpour")], 1),
)
def test_parts_of_a_scripts_replica_lie_together_on_each_of_two_machines(
    tmp_path: Path, how: str, strategy: str
) -> None:
    flags = ("--replicas", "2", "--shards", "2", "--parts", "2", "--strategy", *strategy.split(), *FLAGS)
    with cluster(tmp_path, 2, *flags, script=(PARTED, "--how", how)) as found:
        status, out, err = found.run.finish()
        assert status == 0, err
        other, there = found.machines[0].finish()
        assert other == 0, there
    for replica, text in enumerate((out, there)):
        assert sorted(re.findall(rf"part (\d) of 2 of {replica}", text)) == ["0", "1"]
    with closing(Reader(found.directory / "run.sqlite")) as reader:
        assert audit(reader).complete
        assert {(each.replica, each.part) for each in summarize(reader).parts} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    replayed = squall("replay", found.directory, "--check")
    assert replayed.returncode == 0, replayed.stderr


def begun(found: Cluster) -> Cluster:
    """When every replica has trained."""
    for replica in range(2):
        found.run.wait_rows(ProgressRow, lambda row, replica=replica: row.replica == replica)  # type: ignore[misc]
    return found


@deep.only
def test_a_killed_script_is_replaced_on_its_machine_and_one_that_raises_is_told_with_it(tmp_path: Path) -> None:
    stay = ("--mode", "stay within", "--stay", str(tmp_path / "here"))
    with cluster(tmp_path, 2, "--replicas", "2", *FLAGS, script=(*ENDLESS, *stay)) as found:
        status, _, err = found.run.finish()  # the leader stays, and replica 1 raises
        assert status == 1
        assert "KeyError: 'in the loop'" in err
        assert re.search(r"in replica 1, on machine 1 \(\S+\)", err), err
        assert found.machines[0].finish(SOON_S)[0] == 1
    with cluster(tmp_path, 2, "--replicas", "2", *FLAGS, script=ENDLESS) as found:
        begun(found)
        found.run.kill("replica 1")
        found.event("replaced", "replica 1, on machine 1, where it was")
        rows = len(found.run.rows(ProgressRow))
        found.run.wait_rows(ProgressRow, lambda row: row.replica == 1 and len(found.run.rows(ProgressRow)) > rows + 20)
        found.run.process.send_signal(signal.SIGINT)
        status, _, err = found.run.finish()
        assert status == 130, err


@deep.only
def test_an_interrupted_script_goes_on_with_fewer_machines(tmp_path: Path) -> None:
    """All scripts that catch the interrupt have the snapshot's weights."""
    with cluster(tmp_path, 2, "--replicas", "2", *FLAGS, script=(*ENDLESS, "--mode", "catch")) as found:
        begun(found).run.process.send_signal(signal.SIGINT)
        status, out, err = found.run.finish()
        assert status == 130, err
        there = found.machines[0].finish(SOON_S)[1]
        assert (out + there).count("caught Interrupted, interrupted") == 2
        assert len(weights(out + there)) == 2
        assert len(set(weights(out + there))) == 1
    resumed = Started(found.directory, "resume", str(found.directory), "--machines", "1", "--until", "accuracy=0.5")
    status, out, err = resumed.finish()
    assert status == 0, err
    assert len(weights(out)) == 2
    with closing(Reader(found.directory / "run.sqlite")) as reader:
        assert audit(reader).complete


@deep.only
def test_scripts_of_a_machine_that_is_lost_or_leaves_begin_again_where_there_is_room(tmp_path: Path) -> None:
    flags = ("--replicas", str(REPLICAS), *FLAGS)
    with cluster(tmp_path, 2, *flags, script=ENDLESS) as found:
        begun(found)
        first = found.machines[0]
        first.signal(signal.SIGKILL)
        found.event("lost", "machine 1 was lost: nothing was heard of it")
        found.event("warning", "waits: no machine has room for it")
        first.finish()
        found.machines.append(found.join())
        found.event("replaced", "on machine 2, which had room for")
        found.machines[1].process.send_signal(signal.SIGINT)
        status, there = found.machines[1].finish()
        assert status == 0, there
        assert not weights(there)
        found.event("left", "machine 2")
        found.run.process.send_signal(signal.SIGINT)
        assert found.run.finish()[0] == 130
    with closing(Reader(found.directory / "run.sqlite")) as reader:
        assert audit(reader).complete


@deep.only
def test_a_machine_with_a_shard_leaves_and_the_scripts_begin_again_where_they_join(tmp_path: Path) -> None:
    """On the others, with all that was trained."""
    with cluster(tmp_path, 3, "--replicas", "3", "--shards", "3", *FLAGS, script=ENDLESS) as found:
        found.event("started")
        leaver, other = found.machines
        leaver.process.send_signal(signal.SIGINT)
        status, there = leaver.finish()
        assert status == 0, there
        assert "goes on with its shards on others" in there
        found.event("started", "started again after")
        rows = len(found.run.rows(ProgressRow))
        found.run.wait_rows(ProgressRow, lambda row: len(found.run.rows(ProgressRow)) > rows + 20)
        found.run.process.send_signal(signal.SIGINT)
        status, out, err = found.run.finish()
        assert status == 130, err
        there = other.finish(SOON_S)[1]
    assert out.count("before") == there.count("before") == 1, "a script does not run anew up to where it joins"
    assert not weights(out + there)
    with closing(Reader(found.directory / "run.sqlite")) as reader:
        assert not [span for part in audit(reader).parts for span in part.spans if span.times > 1]


@deep.only
@pytest.mark.parametrize("where", ["between", "behind"])
def test_where_no_coordinator_is_in_charge_an_interrupt_ends_the_scripts_of_all_machines(
    tmp_path: Path, where: str
) -> None:
    stay = ("--mode", f"stay {where}", "--stay", str(tmp_path / "here"))
    with cluster(tmp_path, 2, "--replicas", "2", *FLAGS, script=(SCRIPT, *stay)) as found:
        wait_for((tmp_path / "here").exists, START_S, "a script to be there")
        wait_for(lambda: "replica 0" in found.run.processes(), START_S, "that of the leader, too")
        found.run.process.send_signal(signal.SIGINT)
        status, _, err = found.run.finish(SOON_S)
        assert status == 130
        assert {"between": "before the training began", "behind": "the script not at its end"}[where] in err
        found.machines[0].finish(SOON_S)
    if where == "behind":
        assert Run(found.directory).summary().status == "interrupted"
