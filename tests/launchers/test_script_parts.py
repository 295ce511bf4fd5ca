"""`squall run --parts`: a script in each process of a replica, which says itself what that computes. Real processes."""

from __future__ import annotations

import os
import re
import signal
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from squall.record.rows import MemberRow, MetricRow, ProgressRow
from squall.report import Reader, audit, summarize
from squall.run import Run
from tests import deep
from tests.launchers.processes import Started, wait_for
from tests.launchers.test_parts import at_rest
from tests.warm import python

SCRIPT = str(Path(__file__).with_name("parted.py"))
STEPS = 18  # of three epochs of 92 examples in batches of 16
TRIES = 5


def started(tmp_path: Path, *arguments: str, flags: tuple[str, ...] = ("--replicas", "1"), parts: int = 2) -> Started:
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    return Started(directory, "run", "--run-dir", str(directory), "--parts", str(parts), *flags, SCRIPT, *arguments)


def saved(path: Path, part: int = 0) -> Any:
    """The final weights, the sum of each batch, and what was measured."""
    return torch.load(f"{path}.{part}")


def apart(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Between two states, in the 2-norm, relative to the second's."""
    mine, theirs = (torch.cat([tensor.flatten().double() for tensor in state.values()]) for state in (first, second))
    return float((mine - theirs).norm() / theirs.norm())


def trained(tmp_path: Path, how: str, strategy: str, parts: int) -> str:
    """What such a run has printed. It is made again where it has waited for work with overlap: then the answer to its
    last push comes first, and the next gradient is computed on these weights, which is another training.
    """
    for _ in range(TRIES):
        save = str(tmp_path / f"of-{parts}")
        flags = ("--replicas", "1", "--strategy", *strategy.split())
        run = started(tmp_path, "--how", how, "--save", save, flags=flags, parts=parts)
        status, out, err = run.finish()
        assert status == 0, err
        with closing(Reader(run.directory / "run.sqlite")) as reader:
            pushes = {row.staleness: row.count for row in reader.staleness()}
        if "--overlap" not in strategy or pushes == {0: 1, 1: STEPS - 1}:
            return out
    pytest.fail(f"a replica alone has waited for work in each of {TRIES} runs; the last one's pushes: {pushes}")


@deep.only
@pytest.mark.parametrize(
    ("how", "strategy"),
    deep.sweep(
        [
            ("pipeline", "synchronous"),
            ("examples", "averaging --every 2"),
            ("whole", "synchronous"),
            ("examples", "synchronous"),
            ("pipeline", "downpour --push-every 2 --fetch-every 2"),
            ("pipeline", "diloco --inner-steps 4"),
            ("pipeline", "elastic_averaging --every 3"),
            ("pipeline", "bounded_delay --overlap"),
            ("two optimizers", "downpour"),
        ],
        2,
    ),
)
def test_parts_train_what_one_process_does(tmp_path: Path, how: str, strategy: str) -> None:
    for parts in (1, 2):
        out = trained(tmp_path, how, strategy, parts)
    assert sorted(re.findall(r"part (\d) of 2 of 0, leader (\w+)", out)) == [("0", "True"), ("1", "False")]
    whole, first, second = saved(tmp_path / "of-1"), saved(tmp_path / "of-2"), saved(tmp_path / "of-2", 1)
    assert apart(first[0], whole[0]) < 1e-5
    assert apart(second[0], first[0]) == 0, "every part has the final weights"
    assert whole[1] == first[1] == second[1], "and has had all batches"
    assert len(whole[1]) == STEPS
    assert first[2] == pytest.approx(second[2])


@deep.only
def test_the_first_part_speaks_for_its_replica(tmp_path: Path) -> None:
    run = started(tmp_path, "--how", "examples", flags=("--replicas", "2", "--strategy", "downpour"))
    status, out, err = run.finish()
    assert status == 0, err
    assert len(set(re.findall(r"part (\d) of 2 of (\d)", out))) == 4
    assert len(run.rows(MetricRow)) == 1, "what the leader's parts measure is kept once"
    with closing(Reader(run.directory / "run.sqlite")) as reader:
        found = audit(reader)
    assert found.complete, str(found)
    losses = [row.loss for row in run.rows(ProgressRow) if row.examples]
    assert losses
    assert all(0 < loss < 10 for loss in losses)
    assert run.gone()


@deep.only
def test_the_record_has_what_each_part_did(tmp_path: Path) -> None:
    """Also what it has waited for in operations of its script's own."""
    slow_s = 0.02
    run = started(tmp_path, "--slow-s", str(slow_s))
    status, out, err = run.finish()
    assert status == 0, err
    with closing(Reader(run.directory / "run.sqlite")) as reader:
        first, second = reader.parts()
        assert {(each.replica, each.part) for each in summarize(reader).parts} == {(0, 0), (0, 1)}
    assert "computing" in out
    assert first.compute_s + first.wait_s == pytest.approx(second.compute_s + second.wait_s), "the replica's time"
    assert second.compute_s > STEPS * slow_s
    assert first.wait_s > STEPS * slow_s / 2
    assert first.memory > 0 < second.memory
    assert first.bubble_s == second.bubble_s == 0, "which stages there are nobody knows"


def test_a_script_alone_is_the_one_part(tmp_path: Path) -> None:
    done = python(SCRIPT, "--save", str(tmp_path / "alone"))
    assert done.returncode == 0, done.stderr
    assert "part 0 of 1 of 0, leader True" in done.stdout


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("raise", "KeyError: 'in part 1'"),
        ("break alone", "part 0 at session.step; part 1 at the end of its loop"),
        pytest.param("skip alone", "part 0 at session.step; part 1 at session.skip", marks=deep.only),
        ("same", "two parts of a replica left the same gradient of 0.0.weight"),
        pytest.param("replaced", "0.0.weight of the model that joined is another tensor now", marks=deep.only),
        pytest.param("other data", "session.batches must be given the same dataset length", marks=deep.only),
    ],
)
def test_parts_that_do_not_go_together_end_the_run_with_what_is_wrong(tmp_path: Path, mode: str, message: str) -> None:
    run = started(tmp_path, "--how", "whole", "--mode", mode)
    status, out, err = run.finish()
    assert status == 1, out
    assert message in err
    assert err.count("Traceback") <= 1, err
    assert "part 0 of 2" not in out, "code behind the loop does not run"
    wait_for(run.gone, 5, "the processes to end")


@pytest.mark.parametrize("mode", deep.sweep(["break", "skip"], 1))
@deep.only
def test_what_all_parts_do_the_replica_does(tmp_path: Path, mode: str) -> None:
    run = started(tmp_path, "--how", "examples", "--mode", mode, "--save", str(tmp_path / "saved"))
    status, _, err = run.finish()
    assert status == 0, err
    assert saved(tmp_path / "saved")[1] == saved(tmp_path / "saved", 1)[1]
    assert len(saved(tmp_path / "saved")[1]) == {"break": 3, "skip": STEPS - 1}[mode]
    assert Run(run.directory).summary().ended == {"break": "script", "skip": "data"}[mode]


@pytest.mark.parametrize("victim", deep.sweep(["replica 1 part 1", "replica 1 of"], 1))
@deep.only
def test_a_part_that_dies_is_its_replicas_death(tmp_path: Path, victim: str) -> None:
    run = started(tmp_path, "--how", "examples", "--epochs", "60", flags=("--replicas", "2", "--strategy", "downpour"))
    try:
        for replica in range(2):
            run.wait_rows(ProgressRow, lambda row, replica=replica: row.replica == replica)
        before = run.processes()
        os.kill(before["replica 1 part 1" if "part" in victim else "replica 1"], signal.SIGKILL)
        status, out, err = run.finish()
        assert status == 0, err
        assert len(set(re.findall(r"part (\d) of 2 of (\d)", out))) == 4
        with closing(Reader(run.directory / "run.sqlite")) as reader:
            assert audit(reader).complete
        assert "replica-1.1" in {row.node for row in run.rows(MemberRow) if row.change == "joined"}
    finally:
        run.process.kill()
        run.finish()
        wait_for(run.gone, 10, "the processes to end")


@deep.only
def test_a_part_that_dies_while_its_replica_waits_is_noticed_at_once(tmp_path: Path) -> None:
    """Replica 0 waits for a round in which replica 1 does not push, because it is stopped."""
    run = started(tmp_path, "--how", "pipeline", "--epochs", "1000", flags=("--strategy", "synchronous"))
    try:
        for replica in range(2):
            run.wait_rows(ProgressRow, lambda row, replica=replica: row.replica == replica)
        held, pids = run.kill("replica 1", signal.SIGSTOP), run.processes()
        looks: deque[list[str]] = deque(maxlen=30)
        wait_for(lambda: at_rest(looks, pids["replica 0"], pids["replica 0 part 1"]), 30, "replica 0 to wait")
        os.kill(pids["replica 0 part 1"], signal.SIGKILL)
        run.wait_rows(MemberRow, lambda row: (row.node, row.change) == ("replica-0.0", "lost"), 10)
        run.wait_rows(MemberRow, lambda row: (row.node, row.change) == ("replica-0.1", "joined"))
        os.kill(held, signal.SIGCONT)
    finally:
        run.process.kill()
        run.finish()
        wait_for(run.gone, 10, "the processes to end")


@deep.only
@pytest.mark.parametrize(("how", "parts"), [("pipeline", None), ("examples", 3), ("examples", 1)])
def test_an_interrupt_ends_all_parts_and_a_resume_goes_on_with_as_many_or_others(
    tmp_path: Path, how: str, parts: int | None
) -> None:
    run = started(tmp_path, "--how", how, "--epochs", "40")
    run.wait_rows(ProgressRow, lambda row: row.examples > 0)
    run.process.send_signal(signal.SIGINT)
    status, out, err = run.finish()
    assert status == 130, err
    assert err == f"squall: interrupted; go on from snapshot 1 with: squall resume {run.directory}\n"
    assert "part 0" not in out
    assert run.gone()
    others = () if parts is None else ("--parts", str(parts))
    status, out, err = Started(run.directory, "resume", str(run.directory), *others).finish()
    assert status == 0, err
    number = parts or 2
    assert set(re.findall(r"part (\d) of (\d) of 0", out)) == {(str(part), str(number)) for part in range(number)}
    with closing(Reader(run.directory / "run.sqlite")) as reader:
        assert audit(reader).complete
