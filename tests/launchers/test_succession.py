"""A killed shard is succeeded: the run goes on, nothing that was acknowledged is lost, and it is replayed as ever."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

import squall
from squall.errors import ProcessLost
from squall.record.rows import ProgressRow
from squall.report import Reader, audit
from tests import deep
from tests.launchers import blobs
from tests.launchers.processes import Started, wait_for
from tests.launchers.test_machines import cluster
from tests.warm import squall as command


@pytest.mark.parametrize("strategy", deep.sweep(["downpour", "synchronous"], 1))
def test_a_killed_shard_is_succeeded_and_no_example_is_lost(tmp_path: Path, strategy: str) -> None:
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = Started.train(directory, "--strategy", strategy, "--replicas", "2", "--shards", "2", "--epochs", "100000")
    try:
        run.wait_rows(ProgressRow, lambda row: True)
        for role, times in (("shard 1", 1), ("shard 0", 1), ("shard 1", 2)):
            run.kill_shard(role)
            wait_for(lambda role=role, times=times: run.replaced(role) == times, 20, f"a successor of {role}")
            run.goes_on()
        run.process.send_signal(signal.SIGINT)
        status, _, err = run.finish()
    finally:
        run.process.kill()
        run.process.communicate()
    assert status == 130, err
    assert run.gone()
    with closing(Reader(directory / "run.sqlite")) as reader:
        assert not any(part.missed for part in audit(reader).parts)
    replayed = command("replay", directory, "--check")
    assert replayed.returncode == 0, replayed.stderr
    assert "the same, bit for bit" in replayed.stdout


def test_a_shard_on_another_machine_is_succeeded_there(tmp_path: Path) -> None:
    """Its peers' connections break, and they call the successor at the same address."""
    with cluster(tmp_path, 2, "--replicas", "3", "--shards", "2", "--threads", "1", "--epochs", "100000") as found:
        found.event("started", "")
        for role in ("shard 0", "shard 1"):
            found.run.kill_shard(role)
            wait_for(lambda role=role: found.run.replaced(role), 20, f"a successor of {role}")
            found.run.goes_on()
        found.run.process.send_signal(signal.SIGINT)
        assert found.run.finish()[0] == 130
    with closing(Reader(found.directory / "run.sqlite")) as reader:
        assert not any(part.missed for part in audit(reader).parts)


class Deadly(torch.optim.SGD):
    """Kills its process in the midst of an update, unless there is a file SPARED."""

    updates = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.updates += 1
        if self.updates == 300 and not Path(os.environ["SPARED"]).exists():
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_shard_that_dies_over_an_update_ends_the_run_which_goes_on_from_its_snapshot(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spared = run_dir.with_name("spared")
    monkeypatch.setenv("SPARED", str(spared))
    strategy = squall.Downpour(replicas=2, shards=1, optimizer=partial(Deadly, lr=0.05))
    settings = squall.Settings(snapshot_every_s=0.02, restarts=0)
    with pytest.raises(ProcessLost, match=rf"^shard 0 died over an update\n.* with: squall resume {run_dir}$"):
        squall.fit(blobs.task, strategy, epochs=3, settings=settings, run_dir=run_dir)
    again = run_dir.with_name("again")
    with pytest.raises(
        ProcessLost, match="died over an update; it had been started again once, without a new snapshot"
    ):
        squall.fit(
            blobs.task, strategy, epochs=3, settings=replace(settings, snapshot_every_s=None), restarts=1, run_dir=again
        )
    spared.touch()
    done = command("resume", run_dir)
    assert done.returncode == 0, done.stderr
    assert "finished: all data is trained" in done.stdout
