"""The record tells what each process does, and for whom it waits, also of one that stands still."""

import signal
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from squall.record.rows import ActivityRow
from tests.launchers.processes import Started, training_all, wait_for


@pytest.fixture
def lock_step(tmp_path: Path) -> Iterator[Started]:
    """A shard applies what both replicas have pushed."""
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = Started.train(directory, "--epochs", "100000", "--strategy", "synchronous")
    with training_all(run, 2):
        yield run


def test_who_stands_still_is_found_behind_those_who_wait(lock_step: Started) -> None:
    lock_step.wait_rows(ActivityRow, lambda row: row.compute_s > 0)
    lock_step.kill("replica 1", signal.SIGSTOP)
    stood = max(row.time_s for row in lock_step.rows(ActivityRow))

    def waiting(node: str) -> set[str]:
        """For whom it has waited all of its time since."""
        later = [row for row in lock_step.rows(ActivityRow) if row.node == node and row.time_s > stood + 0.5]
        return {row.awaited for row in later if row.awaited_s > 0.9 * row.seconds}

    wait_for(lambda: waiting("replica-0.0") == {"shard 0"}, 10, "replica 0 to wait")
    wait_for(lambda: waiting("shard-0.0") == {"replica 1"}, 10, "the shard to wait")
    assert not waiting("replica-1.0")
