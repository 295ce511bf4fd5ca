"""`squall resume` after an interruption, with the same and with other numbers of processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from uuid import uuid4

import pytest

from squall.record import Progress
from squall.report import Reader, audit
from tests.launchers.processes import Started


@pytest.fixture
def interrupted(tmp_path: Path) -> Started:
    run = Started.train(
        tmp_path / f"run-{uuid4().hex[:8]}", "--epochs", "400", "--shards", "2", "--optimizer", "adam", "--lr", "0.001"
    )
    run.wait_rows(Progress, lambda row: row.examples > 0)
    run.process.send_signal(signal.SIGINT)
    run.finish()
    return run


@pytest.mark.parametrize("changes", [(), ("--shards", "3", "--replicas", "1")])
def test_a_resumed_run_trains_every_example(interrupted: Started, changes: tuple[str, ...]) -> None:
    reader = Reader(interrupted.directory / "run.sqlite")
    before = sum(row.examples for row in reader.rows(Progress))
    reader.close()
    epochs = before // 4096 + 2
    flags = ("--epochs", str(epochs), *changes, "--json")
    again = Started(interrupted.directory, "resume", str(interrupted.directory), *flags)
    status, out, err = again.finish()
    assert status == 0, err
    summary = json.loads(out)
    assert summary["status"] == "finished"
    assert summary["examples"] >= epochs * 4096
    reader = Reader(interrupted.directory / "run.sqlite")
    found = audit(reader)
    reader.close()
    assert found.complete, str(found)
    assert len(found.epochs) == epochs


def test_another_model_is_refused_with_the_tensors_that_differ(interrupted: Started) -> None:
    from squall.run import load_code, write_plan

    code = load_code(interrupted.directory)
    original = code["task"]

    def wider():  # type: ignore[no-untyped-def]
        import dataclasses

        from torch import nn

        task = original()
        model = nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 8))
        return dataclasses.replace(task, model=model)

    write_plan(interrupted.directory, {**code, "task": wider})  # type: ignore[typeddict-item]
    status, _, err = Started(interrupted.directory, "resume", str(interrupted.directory)).finish()
    assert status == 1
    assert "0.weight: [48, 16] here, [32, 16] there" in err
    assert "Traceback" not in err
