"""What replicas of several processes tell of their parts, as rows of the record."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path

import pytest

import squall
from squall.launchers.inline import LoneChannel
from squall.plan import make_plan
from squall.protocol.effects import End
from squall.protocol.messages import Stats
from squall.protocol.nodes import Node
from squall.protocol.notes import TrainingBegan, WorkReported
from squall.report import Reader
from squall.runtime.job import private_job
from squall.runtime.parts_told import PartsHost
from squall.runtime.recorder import CoordinatorHost
from squall.vector import Layout
from tests.tasks import LOCAL, regression


def test_a_replica_tells_sums_and_its_replacement_begins_anew(tmp_path: Path) -> None:
    strategy = squall.Downpour(replicas=2)
    task = regression(split=squall.Pipeline(microbatches=4))()
    plan = make_plan(strategy, dataclasses.replace(LOCAL, parts=2))
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    job = private_job(plan, strategy, task, layout, tmp_path)
    recorder = CoordinatorHost(job, LoneChannel())
    host = PartsHost(recorder, recorder, job)
    first, other, again = Node("replica", 0), Node("replica", 1), Node("replica", 0, 1)
    host.perform(TrainingBegan(), 1.0)
    for node, inside in (
        (first, (1.0, 2.0, 3.0, 0.0, 3.0, 2.0, 1.0, 70.0)),
        (other, (9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0)),
        (first, ()),  # it has computed nothing since
        (first, (1.5, 2.5, 3.0, 60.0, 4.5, 1.5, 1.0, 70.0)),  # the second computed while the first had yet to begin
        (again, (0.5, 0.5, 0.5, 50.0, 1.0, 0.0, 0.5, 80.0)),
    ):
        host.perform(WorkReported(node, Stats(16, 1, inside=inside)), 2.0)
    host.perform(End("finished"), 3.0)
    with closing(Reader(tmp_path / "run.sqlite")) as reader:
        found = {
            (row.replica, row.part): (row.compute_s, row.wait_s, row.bubble_s, row.memory) for row in reader.parts()
        }
        assert float(reader.state()["bubble"]) == pytest.approx(1 / 5)
    assert found == {
        (0, 0): (2.0, 3.0, 3.5, 60), (0, 1): (5.5, 1.5, 1.5, 80), (1, 0): (9.0, 9.0, 9.0, 9), (1, 1): (9.0, 9.0, 9.0, 9)
    }  # fmt: skip
