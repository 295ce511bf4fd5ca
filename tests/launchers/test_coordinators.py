"""A killed coordinator is succeeded: the run goes on, its record tells everything once, and it is replayed as ever."""

from __future__ import annotations

import os
import re
import signal
from contextlib import closing, suppress
from pathlib import Path
from uuid import uuid4

import pytest

from squall.record.rows import MetricRow, ProgressRow
from squall.report import Reader, audit
from tests import deep
from tests.launchers.processes import Started, wait_for
from tests.launchers.test_machines import cluster
from tests.launchers.test_restarts import restarts
from tests.warm import squall as command

NAME = "coordinator 0"  # as the record has it


def kill(run: Started) -> None:
    """The coordinator; and wait until another one goes on in its place."""
    before = run.replaced(NAME)
    wait_for(lambda: "coordinator" in run.processes(), 20, "a coordinator")
    run.kill("coordinator")
    wait_for(lambda: run.replaced(NAME) == before + 1, 20, "its successor")
    run.goes_on()


@pytest.mark.parametrize("strategy", deep.sweep(["downpour", "synchronous", "all_reduce", "diloco", "sandblaster"], 1))
def test_a_killed_coordinator_is_succeeded_and_no_example_is_lost(tmp_path: Path, strategy: str) -> None:
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    longer = ("--batch", "256") if strategy == "sandblaster" else ()  # on batches of its own it converges late
    run = Started.train(directory, "--strategy", strategy, "--replicas", "2", "--epochs", "100000", *longer)
    try:
        run.wait_rows(ProgressRow, lambda row: True)
        for _ in range(3):
            kill(run)
        run.process.send_signal(signal.SIGINT)
        status, _, err = run.finish()
    finally:
        run.process.kill()
        run.process.communicate()
    assert status == 130 or (longer and status == 0), err
    assert run.gone()
    with closing(Reader(directory / "run.sqlite")) as reader:
        assert not any(part.missed or part.repeated for part in audit(reader).parts)
        measured = [(row.name, row.updates) for row in reader.rows(MetricRow)]
    # Others may measure weights again: behind a search that found no step, or where an update takes longer than that.
    if strategy not in ("sandblaster", "diloco"):
        assert len(measured) == len(set(measured)), "an evaluation was told twice"
    replayed = command("replay", directory, "--check")
    assert replayed.returncode == 0, replayed.stderr


@deep.only
def test_with_all_that_is_trained_counted_once(tmp_path: Path) -> None:
    """The run ends well, and what replicas report adds up to what there is."""
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = Started.train(directory, "--replicas", "2", "--epochs", "20")
    try:
        run.wait_rows(ProgressRow, lambda row: True)
        kill(run)
        status, out, err = run.finish()
    finally:
        run.process.kill()
        run.process.communicate()
    assert status == 0, err
    assert "all data is trained" in out
    with closing(Reader(directory / "run.sqlite")) as reader:
        examples = int(reader.state()["examples_per_epoch"])
        assert sum(row.examples for row in reader.rows(ProgressRow)) == 20 * examples
        assert not any(part.missed or part.repeated for part in audit(reader).parts)


SHARDS = ("--shards", "2")


@pytest.mark.parametrize("flags", deep.sweep([SHARDS, ("--strategy", "all_reduce", "--evaluate-every-s", "0.3")], 1))
def test_on_several_machines_its_successor_is_called_at_the_same_address(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    with cluster(tmp_path, 2, "--replicas", "3", "--threads", "1", "--epochs", "100000", *flags) as found:
        found.event("started", "")
        kill(found.run)
        kill(found.run)
        third = found.join()  # of which the successor hears
        found.event("joined", "machine 2")
        found.run.process.send_signal(signal.SIGINT)
        assert found.run.finish()[0] == 130
        third.finish()
    with closing(Reader(found.directory / "run.sqlite")) as reader:
        assert not any(part.missed for part in audit(reader).parts)


@deep.only
@pytest.mark.parametrize("role", ["coordinator", "shard 0"])
def test_on_several_machines_a_run_begins_again_when_who_dies_again_and_again_is_succeeded_no_more(
    tmp_path: Path, role: str
) -> None:
    flags = ("--replicas", "3", "--threads", "1", "--shards", "2", "--epochs", "100000", "--snapshot-every-s", "0.5")
    with cluster(tmp_path, 2, *flags) as found:
        found.event("started", "")
        run, last = found.run, 0
        while not restarts(run):
            wait_for(lambda last=last: run.processes().get(role, last) != last or restarts(run), 20, "another one")
            if (last := run.processes().get(role, last)) and not restarts(run):
                with suppress(ProcessLookupError):
                    os.kill(last, signal.SIGKILL)
        assert re.match(rf"{role} \(pid \d+\) was lost: killed by SIGKILL; starting again from", restarts(run)[0])
        run.goes_on()
        run.process.send_signal(signal.SIGINT)
        assert run.finish()[0] == 130
    with closing(Reader(found.directory / "run.sqlite")) as reader:
        assert not any(part.missed for part in audit(reader).parts)
