"""A killed shard is succeeded: the run goes on, nothing that was acknowledged is lost, and it is replayed as ever."""

from __future__ import annotations

import math
import os
import signal
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

import squall
from squall.record.rows import EventRow, LossRow, ProgressRow
from squall.report import Reader, audit
from squall.runtime import copies
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


class Deadly(torch.optim.Adam):
    """Kills its process in the midst of an update, once: that is noted in the file KILLED."""

    updates = 0

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        copies.SELDOM_S = math.inf  # so there is a copy of the beginning alone, and all updates are lost

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.updates += 1
        if self.updates == 300:
            with suppress(FileExistsError):
                Path(os.environ["KILLED"]).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("shards", deep.sweep([1, 2], 1))
def test_a_shard_that_dies_inside_an_update_goes_back_to_its_copy(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    """What it had applied since is trained again, and named; and a replay goes back as the run did."""
    monkeypatch.setattr(copies, "SELDOM_S", copies.SELDOM_S)  # which is changed
    monkeypatch.setenv("KILLED", str(run_dir.with_name("killed")))
    strategy = squall.Downpour(replicas=2, shards=shards, optimizer=partial(Deadly, lr=0.05))
    squall.fit(blobs.task, strategy, epochs=3, run_dir=run_dir)
    with closing(Reader(run_dir / "run.sqlite")) as reader:
        found, lost = audit(reader), reader.rows(LossRow)
        events = [event.text for event in reader.rows(EventRow) if event.kind == "lost"]
    assert lost
    assert found.complete
    repeated = [
        (part.epoch, at) for part in found.epochs for span in part.repeated for at in range(span.start, span.stop)
    ]
    told = [(row.epoch, at) for row in lost for at in range(row.start, row.stop)]
    assert repeated == sorted(told)
    text = f"inside an update and went back from version 299 to 0; {len(told):,} examples are dealt again"
    assert any(text in event for event in events), events
    assert sum(len(span) for spans in found.lost.values() for span in spans) == len(told)
    assert "Of epoch 0 a shard that died inside an update had lost" in str(found)
    replayed = command("replay", run_dir, "--check")
    assert replayed.returncode == 0, replayed.stderr + replayed.stdout
    assert "the same, bit for bit" in replayed.stdout
